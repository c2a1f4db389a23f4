from collections.abc import Callable

import pytest
import torch

from adaspec.errors import AdaSpecError
from online.config import ProcessSection
from online.device import learning_device, plain_memory_errors


@pytest.mark.parametrize(
    ("named", "count", "chosen"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_the_device_is_the_named_one(
    monkeypatch: pytest.MonkeyPatch, named: str, count: int, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert learning_device(ProcessSection(device=named)) == torch.device(chosen)


@pytest.mark.parametrize(("named", "count"), [("cuda", 0), ("cuda:2", 2)])
def test_a_gpu_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, named: str, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(AdaSpecError, match=f"{named}, but this machine has {count} CUDA GPUs"):
        learning_device(ProcessSection(device=named))


def test_an_out_of_memory_error_says_what_to_do() -> None:
    process = ProcessSection(gpu_bytes=300 << 20)
    with (
        pytest.raises(AdaSpecError, match=r"300 MiB .* process\.gpu_bytes"),
        plain_memory_errors(process),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def run_out_of_host_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def raise_memory_error() -> None:
    raise MemoryError


@pytest.mark.parametrize("ask", [run_out_of_host_memory, raise_memory_error])
def test_so_does_one_of_the_host(ask: Callable[[], None]) -> None:
    with (
        pytest.raises(AdaSpecError, match=r"lower replay\.bytes"),
        plain_memory_errors(ProcessSection()),
    ):
        ask()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), plain_memory_errors(ProcessSection()):
        raise RuntimeError("shapes do not fit")
