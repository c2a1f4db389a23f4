"""On a GPU, a server that swapped to a version drafts bit for bit what one started with it does.

CUDA graphs and the fused K/V projection are on.
"""

from pathlib import Path

import pytest
import torch

from adaspec.versions import VersionWriter
from tests.gpu.conftest import PROMPTS
from tests.gpu.fleet import Fleet
from tests.server.launch import Server
from tests.server.online_loop import generate, recorded_passes, swaps, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.servers("swapped", "cold")]


def test_a_swap_equals_a_cold_start(
    fleet: Fleet, places: Path, writer: VersionWriter, version: int
) -> None:
    def swap(server: Server) -> None:
        writer.point(version, "published by a test")
        # A version goes live before a step, so there must be steps.
        wait_for(lambda: bool(generate(server, [77, 78]) and swaps(server)))
        assert swaps(server) == [(0, version)]

    servers = {name: fleet.server(name) for name in ("swapped", "cold")}
    swapped, cached = recorded_passes(servers["swapped"], places / "swapped", PROMPTS, swap)
    assert cached == 0  # the prefix of the other context is not reused
    cold, cached = recorded_passes(servers["cold"], places / "cold", PROMPTS, lambda _: None)
    assert cached > 0
    assert len(cold) > len(PROMPTS)
    assert [step.request for step in swapped] == [step.request for step in cold]
    for ours, theirs in zip(swapped, cold, strict=True):
        assert torch.equal(ours.ids, theirs.ids)
        assert torch.equal(ours.hidden, theirs.hidden)
        assert torch.equal(ours.drafted, theirs.drafted)
    for server in servers.values():
        assert "fused KV materialization enabled" in server.log()
        assert "draft greedy head folded into the draft cuda graph" in server.log()
    wait_for(lambda: "is served as published" in servers["swapped"].log())
