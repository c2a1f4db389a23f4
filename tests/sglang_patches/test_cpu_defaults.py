"""What the platform fills in when the user gives a model path alone."""

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from adaspec.errors import AdaSpecError
from sglang_patches.cpu.platform import AdaSpecCpuPlatform
from tests.server.tiny_models import write_drafter, write_target

pytestmark = pytest.mark.skipif(
    not isinstance(current_platform, AdaSpecCpuPlatform), reason="a GPU is present"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load_plugins()
    return write_target(tmp_path_factory.mktemp("target"))


def resolve(model: Path, **arguments: Any) -> Any:
    server_args = ServerArgs(model_path=str(model), **arguments)
    server_args.resolve_once()
    return resolved_view(server_args)


def test_a_model_path_alone_is_enough(model: Path) -> None:
    resolved = resolve(model)
    assert resolved.device == "cpu"
    assert resolved.attention_backend == "torch_native"
    assert resolved.sampling_backend == "pytorch"
    assert resolved.dtype == "float32"
    assert 0 < resolved.mem_fraction_static <= 0.5
    assert resolved.max_running_requests >= 8
    assert resolved.max_total_tokens >= resolved.max_running_requests * 1024
    assert resolved.chunked_prefill_size > 0
    assert resolved.sleep_on_idle
    assert not resolved.disable_overlap_schedule
    assert not resolved.disable_radix_cache
    assert resolved.cuda_graph_config.decode.backend == "disabled"
    assert resolved.cuda_graph_config.prefill.backend == "disabled"


def test_the_users_choices_win(model: Path) -> None:
    chosen = {
        "dtype": "bfloat16",
        "mem_fraction_static": 0.3,
        "max_running_requests": 9,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 128,
    }
    resolved = resolve(model, **chosen)
    assert {name: getattr(resolved, name) for name in chosen} == chosen


def test_dflash_is_allowed_with_overlap_scheduling(model: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter")
    resolved = resolve(
        model,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(drafter),
    )
    assert resolved.speculative_draft_attention_backend == "torch_native"
    assert resolved.speculative_num_draft_tokens == 4
    assert not resolved.disable_overlap_schedule


def test_tree_algorithms_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="EAGLE speculative decoding is not supported"):
        resolve(model, speculative_algorithm="EAGLE", speculative_draft_model_path=str(model))


@pytest.mark.parametrize("field", ["attention_backend", "decode_attention_backend"])
def test_an_attention_backend_of_a_gpu_is_refused(model: Path, field: str) -> None:
    with pytest.raises(AdaSpecError, match="flashinfer does not run on the CPU platform"):
        resolve(model, **{field: "flashinfer"})
