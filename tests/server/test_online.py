"""The online loop on a live server: feedback leaves, a learner learns, versions go live.

Outputs must be the target's before, during and after swaps, whatever happens to the learner.
"""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from adaspec.feedback import FeedbackReceiver, RollbackRecord, open_channel
from adaspec.load.launch import ServerSpec, free_port, start_server
from adaspec.versions import VersionStore, open_writer
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.online_loop import (
    LENGTH,
    Learner,
    generate,
    metric,
    publish,
    recorded_passes,
    recording_spec,
    swaps,
    wait_for,
    write_server_config,
)
from tests.server.recording_server import DraftPass
from tests.server.reference import ReferenceModel

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

RECORDER = "tests.server.recording_server"
PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(12)]
# Many control windows, so that trials end soon.
WATCH = "[watch]\nwindow_tokens = 2000\ncontrol_share = 0.125\n"


@pytest.fixture
def learner(tiny_drafter: Path, tiny_target: Path, tmp_path: Path) -> Iterator[Learner]:
    process = Learner(tiny_drafter, tiny_target, tmp_path)
    yield process
    process.close()


@pytest.fixture
def server(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> Iterator[Server]:
    spec = ServerSpec(
        target=str(tiny_target),
        port=free_port(),
        drafter=str(tiny_drafter),
        dtype="float32",
        config=write_server_config(tmp_path, refresh_share=0.3, more=WATCH),
        extra=("--enable-metrics",),
    )
    log = tmp_path / "server.log"
    with start_server(spec, log=log) as process:
        process.wait_until_healthy(300)
        yield Server(process.url, log)


def test_a_live_server_learns(
    server: Server, learner: Learner, tiny_target: Path, tmp_path: Path
) -> None:
    reference = ReferenceModel(tiny_target)
    expected = [reference.greedy(prompt, LENGTH) for prompt in PROMPTS]

    def serve_all() -> float:
        """Committed tokens per target pass over all prompts, whose outputs are checked."""
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: generate(server, prompt), PROMPTS))
        assert [answer["output_ids"] for answer in answers] == expected
        passes = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        return len(PROMPTS) * (LENGTH - 1) / passes

    def serve_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline, learner.log()[-4000:]
            serve_all()
            time.sleep(0.5)  # the learner needs a share of the cores

    static = serve_all()  # nobody listens yet
    learner.start()
    serve_until(lambda: len(swaps(server)) > 0)
    learner.end(signal.SIGKILL)
    judged = learner.log().count("decision: ")
    serve_all()
    learner.start()
    # It may have learned all there is before it was killed: then it judges and publishes nothing.
    store = VersionStore(tmp_path / "store")
    serve_until(lambda: learner.log().count("decision: ") > judged)
    serve_until(
        lambda: swaps(server)[-1][1] == store.current().number and serve_all() > 1.3 * static
    )
    assert learner.end(signal.SIGTERM) == 0
    assert serve_all() > 1.1 * static  # steps of control windows are the base's
    wait_for(lambda: "is served as published" in server.log())

    # A version that should never have been published.
    good = swaps(server)[-1][1]
    serve_until(lambda: f"version {good} stays" in server.log())
    writer = open_writer(tmp_path / "store", learner.drafter)
    bad = publish(writer, learner.drafter)
    writer.close()
    serve_until(lambda: f"rolled back from version {bad} to {good}" in server.log())
    assert serve_all() > 1.1 * static  # steps of control windows are the base's
    notice = rollback_notice(tmp_path / "channel", writer.lineage)
    assert (notice.version, notice.restored) == (bad, good)
    assert "committed tokens per pass" in notice.reason

    assert "not the published ones" not in server.log()
    assert "Traceback" not in server.log()
    wait_for(lambda: metric(server, "adaspec_live_version") == good)
    assert metric(server, "adaspec_swaps_total", version=str(good), cause="rollback") == 1
    wait_for(lambda: metric(server, "adaspec_swap_pause_seconds_count") == len(swaps(server)))
    wait_for(lambda: metric(server, "adaspec_committed_tokens_total", version=str(good)) > 0)
    assert metric(server, "adaspec_feedback_records_total", outcome="sent") > 0


def test_a_swap_equals_a_cold_start(tiny_target: Path, tmp_path: Path) -> None:
    drafter = write_fitted_drafter(tmp_path / "drafter", tiny_target, PROMPTS[:4])
    writer = open_writer(tmp_path / "store", drafter)
    config = write_server_config(tmp_path, refresh_share=0.0)

    def swap(server: Server) -> None:
        publish(writer, drafter)
        # A version goes live before a step, so there must be steps.
        wait_for(lambda: bool(generate(server, [77, 78]) and swaps(server)))
        assert swaps(server) == [(0, 1)]

    swapped, cached = record(tiny_target, drafter, tmp_path / "swapped", config, swap)
    assert cached == 0  # the prefix of the other context is not reused
    cold, cached = record(tiny_target, writer.path(1), tmp_path / "cold", config, lambda _: None)
    assert cached > 0
    writer.close()
    assert [step.request for step in swapped] == [step.request for step in cold]
    for ours, theirs in zip(swapped, cold, strict=True):
        assert torch.equal(ours.hidden, theirs.hidden)
        assert torch.equal(ours.drafted, theirs.drafted)


def rollback_notice(channel: Path, lineage: str) -> RollbackRecord:
    """The next roll-back that the server tells the learner, in whose place we listen."""
    receiver = FeedbackReceiver(open_channel(channel).feedback, lineage)
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            record = receiver.receive(1.0)
            if isinstance(record, RollbackRecord):
                return record
    finally:
        receiver.close()
    raise AssertionError("no roll-back was told")


def record(
    target: Path, drafter: Path, directory: Path, config: Path, change: Callable[[Server], object]
) -> tuple[list[DraftPass], int]:
    """`recorded_passes` of a server of its own."""
    spec = recording_spec(target, drafter, directory, config)
    log = directory / "server.log"
    with start_server(spec, log=log, command=command(spec, RECORDER)) as process:
        process.wait_until_healthy(300)
        return recorded_passes(Server(process.url, log), directory, PROMPTS[:4], change)
