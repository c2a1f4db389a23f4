"""Copies behind the back of the serving stream arrive whole, and nobody waits for them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_patches.online.host_copies import HostCopier
from tests.gpu.watched_server import noted_waits

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CYCLES = 20_000_000  # about ten milliseconds of the GPU


def test_copies_are_whole_although_their_memory_is_used_again_at_once() -> None:
    copier = HostCopier(DEVICE)
    waiting = []
    with noted_waits() as waits:
        for value in range(20):
            source = torch.full((1 << 18,), value, device=DEVICE)
            with torch.cuda.stream(copier._stream):
                torch.cuda._sleep(CYCLES)  # the copies come late
            (copy,), wait = copier.start([source])
            waiting.append((value, copy, wait))
            del source
            torch.full((1 << 18,), -1, device=DEVICE)  # in the same memory, were it free
    assert not waits
    with ThreadPoolExecutor(1) as pool:
        for value, copy, wait in waiting:
            pool.submit(wait).result()
            assert copy.is_pinned()
            assert torch.equal(copy, torch.full((1 << 18,), value))


def test_a_copy_waits_for_what_the_serving_stream_is_still_computing() -> None:
    copier = HostCopier(DEVICE)
    source = torch.zeros(1 << 18, device=DEVICE)
    serving = torch.cuda.Stream()
    serving.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(serving):
        torch.cuda._sleep(CYCLES)
        source.fill_(7)
        (copy,), wait = copier.start([source])
    wait()
    assert torch.equal(copy, torch.full((1 << 18,), 7.0))
