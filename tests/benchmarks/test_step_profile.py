"""A step's time is accounted for from a trace of graph launches and what lies between."""

import gzip
import json
from pathlib import Path

import pytest

from adaspec.errors import AdaSpecError
from benchmarks.gpu.step_profile import read, table


def launch(correlation: int, ts: float) -> dict:
    return {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": ts, "dur": 2.0,
        "args": {"correlation": correlation},
    }  # fmt: skip


def kernel(correlation: int, ts: float, dur: float, name: str = "gemm") -> dict:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


def write(events: list[dict], file: Path) -> Path:
    with gzip.open(file, "wt") as out:
        json.dump({"traceEvents": events}, out)
    return file


def steps(count: int) -> list[dict]:
    """Steps of 100 µs: target 0 to 30 (two streams overlap), accept 40 to 45, draft 50 to 60."""
    events = []
    for i in range(count):
        t, target, draft, accept = 100.0 * i, 10 * i, 10 * i + 1, 10 * i + 2
        events += [launch(target, t), launch(draft, t + 1)]
        events += [kernel(target, t, 20), kernel(target, t + 10, 20), kernel(target, t + 12, 3)]
        events += [kernel(accept, t + 40, 5, "accept"), kernel(draft, t + 50, 10)]
    return events


def test_every_microsecond_of_a_step_has_its_place(tmp_path: Path) -> None:
    profile = read(write(steps(5), tmp_path / "a.trace.json.gz"))
    assert profile.steps == 4
    assert profile.wall == pytest.approx(100.0)
    assert profile.target == pytest.approx(30.0)
    assert profile.draft == pytest.approx(10.0)
    assert profile.eager == pytest.approx(5.0)
    assert profile.idle == pytest.approx(55.0)
    assert profile.launches == pytest.approx(1.0)
    assert profile.eager_kernels == {"accept": (pytest.approx(5.0), pytest.approx(1.0))}
    assert table({"a": profile}).splitlines()[1].split()[:3] == ["a", "100", "30"]


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match="target passes"):
        read(write(steps(2), tmp_path / "a.trace.json.gz"))
