"""Record the feedback of a live server, phase after phase, for the drift laboratory.

    python -m benchmarks.drift.record --out DIR --drafter DIR maths=gsm8k.jsonl french=french.jsonl

starts a server with the drafter, serves each phase's prompts and stores every trajectory that its
feedback rebuilds, `DIR/0-maths/000000.safetensors` and so on, with the target's last hidden states
as its word. The drafter never changes.
"""

import argparse
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from adaspec.config import AdaSpecConfig, ChannelConfig, TapConfig, VerifyConfig, write_config
from adaspec.drafters.checkpoint import read_drafter_config
from adaspec.feedback import FeedbackReceiver, RollbackRecord, open_channel
from adaspec.load.client import Sampling
from adaspec.load.launch import ServerSpec, free_port, start_server
from adaspec.load.prompts import load_prompts
from adaspec.load.runner import LoadPlan, run_plans
from adaspec.target.smollm2 import ensure_smollm2
from adaspec.versions import lineage_of
from benchmarks.drift.recording import save_trajectory
from online.assembly import Assembler
from online.config import IntakeSection
from online.target import load_target_matrices

_QUIET_S = 3.0


class Recorder(threading.Thread):
    """Writes the trajectories of the running phase.

    Attributes:
        phase: directory written to.
    """

    def __init__(self, receiver: FeedbackReceiver, assembler: Assembler) -> None:
        super().__init__(name="recorder", daemon=True)
        self._receiver = receiver
        self._assembler = assembler
        self._stop_asked = threading.Event()
        self._quiet = threading.Event()
        self.phase: Path | None = None
        self.written = 0

    def run(self) -> None:
        """Receive until `finish`."""
        while not self._stop_asked.is_set():
            record = self._receiver.receive(_QUIET_S)
            if record is None:
                self._quiet.set()
                continue
            self._quiet.clear()
            if isinstance(record, RollbackRecord) or self.phase is None:
                continue
            for trajectory in self._assembler.add(record):
                save_trajectory(self.phase / f"{self.written:06d}.safetensors", trajectory)
                self.written += 1

    def wait_until_quiet(self) -> None:
        """Return when nothing has come for a while."""
        self._quiet.clear()
        self._quiet.wait()

    def finish(self) -> None:
        """Stop, and say what was lost."""
        self._stop_asked.set()
        self.join()
        self._receiver.close()
        print(f"{self.written} trajectories; {dict(self._assembler.counters)}")


def record(
    phases: dict[str, Sequence[str]], drafter: Path, out: Path, options: argparse.Namespace
) -> None:
    """Serve the phases in order and write their trajectories below ``out``."""
    target = ensure_smollm2(progress=print)
    out.mkdir(parents=True)
    channel = open_channel(out / "channel")
    config = AdaSpecConfig(
        verify=VerifyConfig(length=options.verify_length),
        tap=TapConfig(enabled=True, bytes_per_second=1e12, queue_bytes=4 << 30),
        channel=ChannelConfig(directory=str(out / "channel")),
    )
    write_config(config, out / "adaspec.toml")
    network = read_drafter_config(drafter)
    matrices = load_target_matrices(target, network, torch.device("cpu"))
    recorder = Recorder(
        FeedbackReceiver(channel.feedback, lineage_of(drafter)),
        Assembler(IntakeSection(top_k=0), network, matrices),
    )
    recorder.start()
    spec = ServerSpec(
        target=str(target),
        port=free_port(),
        drafter=str(drafter),
        dtype=options.dtype,
        config=out / "adaspec.toml",
        extra=tuple(options.server_args.split()),
    )
    with start_server(spec, log=out / "server.log") as server:
        server.wait_until_healthy(options.start_timeout_s)
        for number, (name, prompts) in enumerate(phases.items()):
            recorder.phase = out / f"{number}-{name}"
            recorder.phase.mkdir()
            plan = LoadPlan(
                concurrency=options.concurrency,
                requests=len(prompts),
                warmup=0,
                sampling=Sampling(max_tokens=options.max_tokens, temperature=options.temperature),
            )
            (run,) = run_plans(server.url, prompts, [plan])
            tokens = sum(o.completion_tokens for o in run.outcomes)
            passes = sum(o.target_passes or 0 for o in run.outcomes)
            print(
                f"{name}: {tokens} tokens in {run.wall_s:.0f} s, "
                f"{tokens / max(1, passes):.2f} committed/pass",
                flush=True,
            )
            recorder.wait_until_quiet()
    recorder.finish()


def main() -> None:
    """Parse the options and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phases", nargs="+", metavar="NAME=PROMPTS[:COUNT]")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--verify-length", type=int, default=None)
    parser.add_argument("--server-args", default="")
    parser.add_argument("--start-timeout-s", type=float, default=420.0)
    options = parser.parse_args()
    phases = {}
    for phase in options.phases:
        name, _, source = phase.partition("=")
        path, _, count = source.partition(":")
        prompts = load_prompts(Path(path))
        phases[name] = prompts[: int(count)] if count else prompts
    record(phases, options.drafter, options.out, options)


if __name__ == "__main__":
    main()
