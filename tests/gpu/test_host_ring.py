"""Small results come to the host with the step's counts, and nobody waits for them."""

import pytest
import torch

from sglang_patches.worker.host_ring import HostRing
from tests.gpu.watched_server import noted_waits

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CYCLES = 20_000_000  # about ten milliseconds of the GPU


def test_results_are_whole_once_what_was_queued_behind_them_is_done() -> None:
    ring = HostRing(DEVICE, steps=4, most_bytes=1 << 12)
    taken = []
    with noted_waits() as waits:
        for value in range(4):
            torch.cuda._sleep(CYCLES)
            lengths = torch.full((7,), value, dtype=torch.int32, device=DEVICE)
            log_probs = torch.full((7, 15), -0.5 * value, device=DEVICE)
            copies = ring.take([lengths, log_probs])
            lengths.fill_(-1)  # as a graph's next replay would
            log_probs.fill_(-1.0)
            done = torch.cuda.Event()
            done.record()
            taken.append((value, copies, done))
    assert not waits, waits[0]
    for value, (lengths, log_probs), done in taken:
        done.synchronize()
        assert lengths.is_pinned()
        assert torch.equal(lengths, torch.full((7,), value, dtype=torch.int32))
        assert torch.equal(log_probs, torch.full((7, 15), -0.5 * value))


def test_more_than_a_step_may_have_is_refused() -> None:
    ring = HostRing(DEVICE, steps=2, most_bytes=64)
    with pytest.raises(ValueError, match="do not fit into the 64"):
        ring.take([torch.zeros(17, device=DEVICE)])
