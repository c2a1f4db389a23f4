"""A swap on a GPU equals a cold start, in the parameters and in the fused K/V projection."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adaspec.drafters.checkpoint import read_tensors
from adaspec.load.launch import free_port
from sglang_patches.online.weights import DraftWeights, same_bits
from tests.gpu.servers import BACKENDS
from tests.gpu.watched_server import noted_waits
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.tiny_models import HIDDEN, write_target
from tests.sglang_patches.online.conftest import changed

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
ROWS = 7


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "drafter"
    return write_fitted_drafter(directory, target, [[5, 40, 90, 17]], steps=1)


@pytest.fixture(scope="module")
def sglang_process(target: Path, drafter: Path) -> Iterator[None]:
    """A process that SGLang takes for its only scheduler."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler

    load_plugins()
    words = ["--model-path", str(target), "--speculative-algorithm", "ADASPEC"]
    words += ["--speculative-draft-model-path", str(drafter), *BACKENDS]
    args = prepare_server_args(words)
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
    return read_tensors(drafter)


def cold_start(drafter: Path, tensors: dict[str, Tensor]) -> nn.Module:
    """The drafter as SGLang serves it in bfloat16."""
    from sglang.srt.models.dflash import DFlashDraftModel
    from transformers import AutoConfig

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            model = DFlashDraftModel(AutoConfig.from_pretrained(drafter))
    finally:
        torch.set_default_dtype(default)
    model.load_weights(tensors.items())
    return model


@torch.no_grad()
def fused_helper(model: nn.Module) -> Any:
    """Upstream's, as its worker builds it once."""
    from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper

    attention = model.layers[0].self_attn
    return FusedKVMaterializeHelper(
        layers=list(model.layers),
        rotary_emb=attention.rotary_emb,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        device=torch.device("cuda", torch.cuda.current_device()),
        max_position_hint=256,
    )


@torch.inference_mode()
def context_kv(helper: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer for a few context features, from the fused kernel."""
    features = torch.randn(
        ROWS, HIDDEN, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE
    ).bfloat16()
    written: dict[int, tuple[Tensor, Tensor]] = {}

    def write(layer: int, keys: Tensor, values: Tensor) -> None:
        written[layer] = (keys.clone(), values.clone())

    helper.materialize(features, torch.arange(40, 40 + ROWS, device=DEVICE), write)
    return [written[layer] for layer in sorted(written)]


def equal_kv(left: list[tuple[Tensor, Tensor]], right: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


@pytest.mark.usefixtures("sglang_process")
def test_a_swap_equals_a_cold_start(drafter: Path, tensors: dict[str, Tensor]) -> None:
    model = cold_start(drafter, tensors)
    helper = fused_helper(model)
    weights = DraftWeights(model, lambda: helper)
    assert weights.on_gpu
    assert weights.differences(tensors) == []
    base_kv = context_kv(helper)
    places = [p.data_ptr() for p in model.parameters()]
    places += [helper.flat_kv_weight_t.data_ptr(), helper.k_norm_weights.data_ptr()]

    version = changed(tensors, seed=1)
    weights.stage(version)
    torch.cuda.synchronize()
    with noted_waits() as waits, torch.inference_mode():
        weights.trust_live()
        weights.install_staged()
        swapped_kv = context_kv(helper)
    assert not waits, waits[0]
    fresh = cold_start(drafter, version)
    fresh_kv = context_kv(fused_helper(fresh))
    expected = dict(fresh.named_parameters())
    assert {n for n, p in model.named_parameters() if not same_bits(p, expected[n])} == set()
    assert weights.differences(version) == []
    assert len(base_kv) > 1
    assert equal_kv(swapped_kv, fresh_kv)
    assert not equal_kv(swapped_kv, base_kv)

    with noted_waits() as waits, torch.inference_mode():
        weights.restore()
        restored_kv = context_kv(helper)
    assert not waits, waits[0]
    assert weights.differences(tensors) == []
    assert equal_kv(restored_kv, base_kv)
    now = [p.data_ptr() for p in model.parameters()]
    assert [*now, helper.flat_kv_weight_t.data_ptr(), helper.k_norm_weights.data_ptr()] == places


@pytest.mark.usefixtures("sglang_process")
def test_what_a_swap_left_out_is_named(drafter: Path, tensors: dict[str, Tensor]) -> None:
    model = cold_start(drafter, tensors)
    helper = fused_helper(model)
    weights = DraftWeights(model, lambda: helper)
    version = changed(tensors, seed=1)
    model.load_weights(version.items())  # as upstream's update does
    assert weights.differences(version) == ["fused K/V"]
    assert "norm.weight" in weights.differences(tensors)


@pytest.mark.usefixtures("sglang_process")
@torch.no_grad()
def test_captured_kernels_see_the_swap(drafter: Path, tensors: dict[str, Tensor]) -> None:
    model = cold_start(drafter, tensors)
    weights = DraftWeights(model, lambda: None)
    projection = model.layers[0].mlp.gate_up_proj.weight
    features = torch.randn(ROWS, HIDDEN, device=DEVICE).bfloat16()
    output = features @ projection.t()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(features, projection.t(), out=output)
    version = changed(tensors, seed=1)
    weights.stage(version)
    torch.cuda.synchronize()
    before = output.clone()
    weights.install_staged()
    graph.replay()
    fresh = cold_start(drafter, version).layers[0].mlp.gate_up_proj.weight
    torch.testing.assert_close(output, features @ fresh.t())
    assert not torch.allclose(output, before)
