"""What tap and swaps cost: the stand-ins for the learner, the figures, and a run on tiny models."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adaspec.config import AdaSpecConfig
from adaspec.drafters.checkpoint import read_tensors
from adaspec.feedback import EndRecord, FeedbackSender, open_channel
from adaspec.load.report import RunSummary
from adaspec.versions import VersionStore, is_context_weight, lineage_of
from benchmarks.online import swaps
from benchmarks.online.stand_ins import Publication, discarding_consumer, perturbed, publisher
from benchmarks.online.swaps_report import Run, comparisons, report
from tests.server.tiny_models import write_drafter, write_target


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


@pytest.mark.parametrize("mode", ["frozen-kv", "full"])
def test_noise_falls_on_the_weights_that_the_mode_may_change(drafter: Path, mode: str) -> None:
    base = {name: tensor.bfloat16() for name, tensor in read_tensors(drafter).items()}
    changed = perturbed(base, mode, noise=0.1)
    assert {name: t.dtype for name, t in changed.items()} == dict.fromkeys(base, torch.bfloat16)
    for name, tensor in base.items():
        if mode == "frozen-kv" and is_context_weight(name):
            assert torch.equal(changed[name], tensor)
            continue
        spread = float(tensor.float().std())
        if spread > 0:  # norms are all ones
            difference = float((changed[name].float() - tensor.float()).std())
            assert difference == pytest.approx(0.1 * spread, rel=0.2)


def test_versions_alternate_while_the_publisher_is_active(drafter: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    publication = Publication(
        store=store,
        channel=tmp_path / "channel",
        drafter=drafter,
        seconds=0.1,
        mode="frozen-kv",
        noise=0.1,
    )

    def current() -> int:
        return VersionStore(store).current().number if (store / "CURRENT").exists() else -1

    base = read_tensors(drafter)
    seen: dict[int, bool] = {}
    with publisher(publication) as active:
        wait_for(lambda: current() == 0)
        time.sleep(0.3)
        assert current() == 0
        active.set()
        while len(seen) < 3:
            number = current()
            if number > 0 and number not in seen:
                tensors = VersionStore(store).stage(number).tensors
                seen[number] = all(torch.equal(tensors[name], base[name]) for name in base)
            assert number < 20
    assert all(equals_base == (number % 2 == 0) for number, equals_base in seen.items())


def test_a_consumer_takes_feedback_off_the_servers_hands(drafter: Path, tmp_path: Path) -> None:
    lineage = lineage_of(drafter)
    sender = FeedbackSender(open_channel(tmp_path / "channel").feedback)
    for number in range(20):
        sender.offer(EndRecord(lineage, f"r{number}", 0, 1, "finished"))
    time.sleep(0.3)
    assert sender.stats().sent == 0
    with discarding_consumer(tmp_path / "channel", lineage):
        wait_for(lambda: sender.stats().sent == 20)
    sender.close()


def test_only_what_is_measured_differs_between_the_servers(tmp_path: Path) -> None:
    off, tap, swapped = (swaps.server_config(name, tmp_path, 1e6) for name in swaps.SERVERS)
    assert off == AdaSpecConfig()
    assert tap.tap == swapped.tap
    assert tap.tap.enabled
    assert tap.channel.store is None
    assert swapped.channel.store is not None


def run(server: str, repeat: int, speed: float, p99: float, pauses: tuple[float, ...] = ()) -> Run:
    summary = RunSummary(
        concurrency=2,
        repeat=repeat,
        requests=8,
        errors=0,
        wall_s=10.0,
        output_tokens=round(10 * speed),
        output_tokens_per_s=speed,
        ttft_p50_s=0.1,
        ttft_p99_s=0.1,
        tpot_p50_s=1 / speed,
        tpot_p99_s=2 / speed,
        committed_per_pass=2.0,
        client_cpu_share=0.1,
    )
    return Run(
        server=server,
        summary=summary,
        gap_p50_s=0.02,
        gap_p99_s=p99,
        gap_max_s=2 * p99,
        step_s=0.02,
        feedback_bytes_per_s=0.0 if server == "off" else 3e6,
        feedback={} if server == "off" else {"sent": 5},
        swaps=len(pauses),
        pauses_s=pauses,
    )


def test_the_report_answers_the_questions() -> None:
    runs = []
    for repeat, slow in enumerate((1.0, 2.0, 4.0)):  # the machine, which must not matter
        runs += [
            run("off", repeat, 100 / slow, 0.03 * slow),
            run("tap", repeat, 98 / slow, 0.03 * slow),
            run("swaps", repeat, 97 / slow, 0.033 * slow, (0.001, 0.005)),
        ]
    found = {(c["server"], c["over"], c["figure"]): c for c in comparisons(runs, [2])}
    tap = found["tap", "off", "tokens_per_s"]
    assert tap["low"] == pytest.approx(tap["high"])
    assert tap["ratio"] == pytest.approx(0.98)
    assert found["swaps", "tap", "gap_p99"]["ratio"] == pytest.approx(1.1)
    text = report(runs, [2])
    assert "0.980 [0.980 0.980]" in text
    assert "3.00 MB/s of feedback; records: 15 sent" in text
    assert "6 swaps in 30 s; pause median 3.00 ms, longest 5.00 ms = 0.25 decode steps" in text


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_run_on_tiny_models(drafter: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    options = {
        "out": tmp_path / "result.json",
        "target": target,
        "drafter": drafter,
        "repeats": 2,
        "requests": 8,
        "max-tokens": 48,
        "swap-seconds": 0.2,
        "equality-prompts": 3,
        "equality-tokens": 24,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    assert swaps.main([*words, "--concurrency", "2"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["partings"] == {"tap": [], "swaps": []}
    runs = {name: [r for r in result["runs"] if r["server"] == name] for name in swaps.SERVERS}
    for name, found in runs.items():
        assert [r["summary"]["repeat"] for r in found] == [0, 1]
        assert all(r["summary"]["output_tokens"] == 8 * 48 for r in found)
        assert all(0 < r["gap_p50_s"] <= r["gap_p99_s"] <= r["gap_max_s"] for r in found)
        assert all((r["feedback_bytes_per_s"] > 0) == (name != "off") for r in found)
        assert all((r["swaps"] > 0) == (name == "swaps") for r in found)
    assert any(pause > 0 for r in runs["swaps"] for pause in r["pauses_s"])
