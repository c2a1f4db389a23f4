"""Control windows on a live server: the frozen base drafts in them, and nothing else changes.

A version that drafts badly is published by hand while the traffic stays as it is.
"""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from adaspec.config import WatchConfig
from adaspec.drafters.checkpoint import read_tensors
from adaspec.load.launch import start_server
from adaspec.versions import Provenance, VersionWriter, open_writer
from sglang_patches.online.control import ControlWindows
from sglang_patches.online.served import Served
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.online_loop import (
    LENGTH,
    generate,
    metric,
    recording_spec,
    swaps,
    wait_for,
    write_server_config,
)
from tests.server.recording_server import DraftPass, read_passes
from tests.server.reference import ReferenceModel

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(4)]


def test_a_version_worse_than_the_base_is_found_by_control_windows(
    tiny_target: Path, tmp_path: Path
) -> None:
    drafter = write_fitted_drafter(tmp_path / "drafter", tiny_target, PROMPTS, length=LENGTH)
    writer = open_writer(tmp_path / "store", drafter)
    config = write_server_config(tmp_path, refresh_share=0.0)
    reference = ReferenceModel(tiny_target)
    answers = [reference.greedy(prompt, LENGTH) for prompt in PROMPTS]
    spec = recording_spec(
        tiny_target,
        drafter,
        tmp_path / "server",
        config,
        "--enable-metrics",
        "--max-running-requests=1",
    )
    log = tmp_path / "server" / "server.log"

    with start_server(spec, log=log, command=command(spec, "tests.server.recording_server")) as run:
        run.wait_until_healthy(300)
        server = Server(run.url, log)
        # What the base drafts behind every token of every answer.
        for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
            for length in range(LENGTH - 1):
                generate(server, prompt + answer[:length], f"base-{i}-{length}", length=2)
        publish_bad_draft(writer, drafter)
        wait_for(lambda: bool(generate(server, [77, 78], "swap") and swaps(server)))
        rounds = 0
        while "rolled back" not in server.log():
            assert rounds < 40
            for i, prompt in enumerate(PROMPTS):
                assert generate(server, prompt, f"live-{i}-{rounds}")["output_ids"] == answers[i]
            rounds += 1
        for i, prompt in enumerate(PROMPTS):
            assert generate(server, prompt, f"after-{i}-0")["output_ids"] == answers[i]
        wait_for(lambda: metric(server, "adaspec_live_version") == 0)
        wait_for(lambda: metric(server, "adaspec_gain_over_base", version="1") < -0.2)
        text = server.log()
    writer.close()

    assert "drafter rolled back from version 1 to 0" in text
    assert "times the base's committed tokens per pass over" in text
    assert "not the published ones" not in text

    passes = read_passes(tmp_path / "server" / "records")
    base = {place(step): step.hidden for step in passes if step.request[0].startswith("base")}
    by_base = [drafted_by_base(step, base) for step in passes if is_named(step, "live")]
    assert follows_the_schedule(by_base)
    assert all(drafted_by_base(step, base) for step in passes if is_named(step, "after"))


def is_named(step: DraftPass, kind: str) -> bool:
    return step.request[0].startswith(kind)


def place(step: DraftPass) -> tuple[str, int]:
    """The prompt of a pass, and the position of its anchor."""
    return step.request[0].split("-")[1], int(step.positions[0, 0])


def drafted_by_base(step: DraftPass, base: dict[tuple[str, int], Tensor]) -> bool | None:
    """Whether the states are those of the base at the same place; None behind the last token."""
    expected = base.get(place(step))
    return None if expected is None else torch.allclose(step.hidden, expected, atol=1e-3)


def follows_the_schedule(by_base: list[bool | None]) -> bool:
    """Whether the base drafted in control windows and nowhere else, until the version was gone.

    A few steps of another request came between the swap and the first of these.
    """
    last_live = max(i for i, seen in enumerate(by_base) if seen is False)
    by_base = by_base[: last_live + 1]
    base = Served(0, "context")
    control = ControlWindows(Mock(on_gpu=False), base, WatchConfig().control_share)
    control.follow(Served(1, base.context_sha256))
    schedule = []
    for _ in range(len(by_base) + 2 * LENGTH):
        control.before_step()
        schedule.append(control.is_open)
        control.count_draft()
    return any(
        all(seen in (None, due) for seen, due in zip(by_base, schedule[skipped:], strict=False))
        for skipped in range(2 * LENGTH)
    )


def publish_bad_draft(writer: VersionWriter, drafter: Path) -> None:
    """A version whose context weights are the base's, and whose other weights are worth nothing."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: t + 0.5 * torch.randn(t.shape, generator=generator) if "mlp" in name else t
        for name, t in read_tensors(drafter).items()
    }
    provenance = Provenance(
        parent=0, mode="frozen-kv", objective="", optimiser="", steps=1, tokens_seen=1, gate=None
    )
    number = writer.add(tensors, provenance).number
    writer.point(number, "published by a test")
