"""How long the device or the host is busy with a few operations, read later and elsewhere."""

import time

import torch


class StreamClock:
    """Starts when it is made; nobody waits for the device before `seconds` is asked for.

    Args:
        on_gpu: whether the operations run on the current CUDA stream.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if on_gpu:
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            self._events[0].record()
        self._started = time.perf_counter()
        self._host_seconds = 0.0

    def stop(self) -> None:
        """The last operation has been issued."""
        self._host_seconds = time.perf_counter() - self._started
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Time on the device, or on the host if that is longer; waits for the device."""
        if self._events is None:
            return self._host_seconds
        begin, end = self._events
        end.synchronize()
        return max(self._host_seconds, begin.elapsed_time(end) / 1e3)
