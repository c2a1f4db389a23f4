"""SGLang's own draft model in the test's process, and a version store of its drafter."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from adaspec.drafters.checkpoint import read_tensors
from adaspec.load.launch import free_port
from adaspec.versions import Provenance, VersionWriter, open_writer
from tests.server.tiny_models import write_drafter, write_target


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter") / "drafter")


@pytest.fixture(scope="module")
def sglang_process(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process that SGLang takes for its only scheduler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PLATFORM", "adaspec_cpu")
        from sglang.srt.distributed import parallel_state
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        load_plugins()
        args = ServerArgs(
            model_path=str(write_target(tmp_path_factory.mktemp("target") / "target")),
            device="cpu",
            speculative_algorithm="ADASPEC",
            speculative_draft_model_path=str(drafter),
        )
        args.resolve_once()
        set_global_server_args_for_scheduler(args)
        address = f"tcp://127.0.0.1:{free_port()}"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture
def tensors(drafter: Path) -> dict[str, Tensor]:
    """The drafter's checkpoint."""
    return read_tensors(drafter)


@pytest.fixture
def model(sglang_process: None, drafter: Path, tensors: dict[str, Tensor]) -> nn.Module:
    """The drafter as SGLang serves it, on packed layers, as the CPU platform does."""
    from sglang.srt.models.dflash import DFlashDraftModel
    from transformers import AutoConfig

    from sglang_patches.cpu.packed_linear import pack_linear_layers

    served = DFlashDraftModel(AutoConfig.from_pretrained(drafter))
    served.load_weights(tensors.items())
    pack_linear_layers(served)
    return served


@pytest.fixture
def store(drafter: Path, tmp_path: Path) -> Iterator[VersionWriter]:
    writer = open_writer(tmp_path / "store", drafter)
    yield writer
    writer.close()


def changed(tensors: dict[str, Tensor], seed: int, only: str = "") -> dict[str, Tensor]:
    """Other weights of the same shapes; ``only`` those whose name contains a word."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t + 0.1 * torch.randn(t.shape, generator=generator) if only in name else t
        for name, t in tensors.items()
    }


def provenance(mode: str = "full") -> Provenance:
    return Provenance(
        parent=0, mode=mode, objective="", optimiser="", steps=1, tokens_seen=1, gate=None
    )
