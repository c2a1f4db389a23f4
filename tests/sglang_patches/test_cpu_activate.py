"""When the CPU platform offers itself to SGLang."""

import pytest
import torch

from adaspec.errors import AdaSpecError
from sglang_patches.cpu import activate

PLATFORM = "sglang_patches.cpu.platform.AdaSpecCpuPlatform"


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_active_without_an_accelerator() -> None:
    assert activate() == PLATFORM


def test_leaves_a_cuda_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activate() is None


def test_leaves_any_other_accelerator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None


def test_leaves_sglangs_own_cpu_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


def test_a_named_request_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "adaspec_cpu")
    assert activate() == PLATFORM


def test_a_named_request_next_to_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "adaspec_cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AdaSpecError, match="CUDA_VISIBLE_DEVICES="):
        activate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_sglang_resolves_to_it_by_the_entry_point() -> None:
    from sglang.srt.platforms import _resolve_platform

    platform = _resolve_platform()
    assert f"{type(platform).__module__}.{type(platform).__qualname__}" == PLATFORM


def test_sglang_keeps_cuda_with_the_entry_point_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.platforms import CudaSRTPlatform, _resolve_platform

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    assert isinstance(_resolve_platform(), CudaSRTPlatform)
