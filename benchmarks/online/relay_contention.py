"""What the relay costs a scheduler that Python keeps busy, without a GPU.

    python -m benchmarks.online.relay_contention

A thread does what a host-bound decode step does, many small tensor operations, each of which gives
Python's lock away for a moment. In every other window of time (`blinking_tap.is_open`) it also
submits the capture of a step: 32 requests, 16 tokens each, features and hidden states of SmolLM2,
in one piece of memory as a copy from a device is. Windows are compared as `tap_cost` does. What the
tap itself does on the device, and its few calls to start a copy, are not in this.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from adaspec.feedback import (
    EndCapture,
    FeedbackRelay,
    HiddenTeacher,
    PrefillCapture,
    RelayOptions,
    StepCapture,
    open_channel,
)
from benchmarks.online.blinking_tap import is_open
from benchmarks.online.stand_ins import discarding_consumer
from benchmarks.online.tap_cost import tap_cost

_LINEAGE = "0" * 16
_TAPS, _HIDDEN = 5, 576
_TOKENS = 64  # of each answer, until its request ends


class Traffic:
    """Steps of the same requests, which end and come again."""

    def __init__(self, requests: int, width: int) -> None:
        shapes = {
            "anchors": ((requests,), torch.int64),
            "tokens": ((requests, width), torch.int64),
            "bonus": ((requests,), torch.int64),
            "accepted": ((requests,), torch.int32),
            "taps": ((requests, width, _TAPS * _HIDDEN), torch.bfloat16),
            "states": ((requests * width, _HIDDEN), torch.bfloat16),
        }
        sizes = {n: int(np.prod(shape)) * dtype.itemsize for n, (shape, dtype) in shapes.items()}
        memory, start = torch.zeros(sum(sizes.values()), dtype=torch.uint8), 0
        self._parts = {}
        for name, (shape, dtype) in shapes.items():
            self._parts[name] = memory[start : start + sizes[name]].view(dtype).view(shape)
            start += sizes[name]
        self._requests, self._round, self._step = requests, 0, 0

    def submit(self, relay: FeedbackRelay) -> None:
        """The next step, and what begins and ends with it."""
        names = [f"{self._round}-{i}" for i in range(self._requests)]
        if self._step == 0:
            tokens = [list(range(16))] * len(names)
            rows = torch.zeros((16 * len(names), _TAPS * _HIDDEN), dtype=torch.bfloat16)
            relay.submit(PrefillCapture(names, 0, tokens, [0] * len(names), rows))
        parts = dict(self._parts)
        parts["anchors"].fill_(15 + self._step)
        teacher = HiddenTeacher(parts.pop("states"))
        temperatures = [0.0] * len(names)
        relay.submit(StepCapture(names, 0, temperatures, teacher=teacher, **parts))
        self._step += 1
        if self._step == _TOKENS:
            for name in names:
                relay.submit(EndCapture(name, 16 + _TOKENS))
            self._round, self._step = self._round + 1, 0


def main() -> None:
    """Run for a while and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--window-s", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--operations", type=int, default=1500, help="in a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    traffic, times = Traffic(options.requests, options.width), []
    values = torch.zeros(64)
    with tempfile.TemporaryDirectory() as scratch:
        channel = Path(scratch) / "channel"
        endpoint = open_channel(channel).feedback
        with discarding_consumer(channel, _LINEAGE):
            relay = FeedbackRelay(
                RelayOptions(feedback=endpoint, lineage=_LINEAGE, bytes_per_second=1e12)
            )
            end = time.monotonic() + options.seconds
            while (now := time.monotonic()) < end:
                times.append(now)
                if is_open(int(now / options.window_s)):
                    traffic.submit(relay)
                for _ in range(options.operations):
                    values.add_(1.0)
            stats = relay.stats()
            relay.close()
    full = np.full(len(times), float(options.requests))
    cost = tap_cost(np.array(times), full, options.window_s, options.requests)
    print(f"step alone {1e3 * cost.shut_step_s:.2f} ms, {cost.pairs} pairs of windows")
    print(f"step x {cost.step.estimate:.3f} [{cost.step.low:.3f}, {cost.step.high:.3f}] with relay")
    print(f"records sent {stats.sent}, dropped {dict(stats.dropped)}")


if __name__ == "__main__":
    main()
