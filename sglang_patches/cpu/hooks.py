"""Every replacement made inside SGLang for the CPU platform, listed, explained and checked.

SGLang's own seams (``platform.py``) come first; a hook stands here only where upstream has none.
``sglang.srt.plugins.load_plugins`` logs the exception of a plugin and serves on, so each hook
carries a check of its effect and `verify_installed` refuses to serve when one is missing.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from adaspec.errors import AdaSpecError
from sglang_patches.cpu.kernels import assign_req_to_token, chain_speculative_sampling

_ORIGINAL_RECORD_STREAM = torch.Tensor.record_stream


@dataclass(frozen=True)
class Hook:
    """One replacement inside SGLang.

    Attributes:
        target: Dotted name of the upstream symbol that is replaced.
        install: Puts the replacement in place, or registers it with SGLang's hook registry.
        in_effect: True when the code that SGLang runs is the replacement.
    """

    target: str
    install: Callable[[], None]
    in_effect: Callable[[], bool]


def _install_assign_req_to_token() -> None:
    """Replace ``sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func``.

    Reason: it launches a Triton kernel on every platform but the in-tree CPU engine, and there is
    no platform seam. Without it speculative decoding fails with "no active driver" on the first
    decode step.
    """
    HookRegistry.register(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        assign_req_to_token,
        HookType.REPLACE,
    )


def _assign_req_to_token_in_effect() -> bool:
    table = torch.zeros(2, 4, dtype=torch.int32)
    span = torch.tensor([1]), table, torch.tensor([1]), torch.tensor([3]), torch.tensor([7, 8]), 1
    # Both names are called upstream: the allocator's and the one the workers import.
    for module in ("sglang.srt.mem_cache.allocation", "sglang.srt.speculative.spec_utils"):
        table.zero_()
        try:
            _resolve(f"{module}.assign_req_to_token_pool_func")(*span)
        except Exception:
            return False
        if table.tolist() != [[0, 0, 0, 0], [0, 7, 8, 0]]:
            return False
    return True


def _install_extend_forward_kwargs() -> None:
    """Wrap ``sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs``.

    Reason: it passes ``input_embeds.bfloat16()`` whatever the model's dtype. A float32 drafter
    would get the embeddings of its draft block rounded, and its first matrix product would fail
    on two dtypes. There is no seam between the batch and the model.
    """
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        _keep_input_embeds_dtype,
        HookType.AFTER,
    )


def _keep_input_embeds_dtype(
    kwargs: dict[str, Any], runner: Any, forward_batch: Any, *_: Any, **__: Any
) -> dict[str, Any]:
    embeds = kwargs.get("input_embeds")
    if embeds is None or forward_batch.input_embeds is None:
        return kwargs
    # Overrides that upstream scattered into the copy are kept: only then is the copy used.
    source = embeds if forward_batch.replace_embeds is not None else forward_batch.input_embeds
    return {**kwargs, "input_embeds": source.to(runner.dtype)}


def _extend_forward_kwargs_in_effect() -> bool:
    runner_cls = _resolve("sglang.srt.model_executor.model_runner.ModelRunner")

    class Probe:
        dtype = torch.float32
        support_pp = False
        _pp_kwargs = runner_cls._pp_kwargs
        input_embeds = torch.tensor([1.0009765625])  # not a bfloat16 number
        replace_embeds = None
        replace_positions = None
        get_embedding = False
        is_generation = True

        def __getattr__(self, name: str) -> None:
            return None

    probe = Probe()
    try:
        kwargs = runner_cls._extend_forward_kwargs(probe, probe, None)
    except Exception:
        return False
    return bool(torch.equal(kwargs["input_embeds"], probe.input_embeds))


def _install_record_stream() -> None:
    """Guard ``torch.Tensor.record_stream`` for CPU tensors.

    Reason: ``sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation``
    records ``batch.seq_lens`` on the current stream unconditionally, and PyTorch refuses that for
    CPU tensors. On a CPU there is one stream and nothing to record.
    """
    torch.Tensor.record_stream = _record_stream_unless_cpu  # type: ignore[assignment]


def _record_stream_unless_cpu(self: torch.Tensor, stream: Any) -> None:
    if self.device.type != "cpu":
        _ORIGINAL_RECORD_STREAM(self, stream)


def _record_stream_in_effect() -> bool:
    try:
        torch.zeros(1).record_stream(torch.cpu.current_stream())  # type: ignore[arg-type]
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def _install_chain_sampling() -> None:
    """Set ``tree_speculative_sampling_target_only`` in ``sglang.srt.speculative.dflash_utils``.

    Reason: the op is None off CUDA, and a DFLASH-family worker then verifies sampled requests
    greedily with no more than a warning, which changes their distribution. Only this module's
    name is set: the EAGLE workers use the same op for trees, which the replacement cannot serve.
    """
    module = importlib.import_module("sglang.srt.speculative.dflash_utils")
    module.tree_speculative_sampling_target_only = chain_speculative_sampling  # type: ignore[attr-defined]
    module._DFLASH_SAMPLING_VERIFY_AVAILABLE = True  # type: ignore[attr-defined]


def _chain_sampling_in_effect() -> bool:
    module = importlib.import_module("sglang.srt.speculative.dflash_utils")
    return bool(
        module.is_dflash_sampling_verify_available()
        and module.tree_speculative_sampling_target_only is chain_speculative_sampling
    )


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        _install_assign_req_to_token,
        _assign_req_to_token_in_effect,
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        _install_extend_forward_kwargs,
        _extend_forward_kwargs_in_effect,
    ),
    Hook("torch.Tensor.record_stream", _install_record_stream, _record_stream_in_effect),
    Hook(
        "sglang.srt.speculative.dflash_utils.tree_speculative_sampling_target_only",
        _install_chain_sampling,
        _chain_sampling_in_effect,
    ),
)


def install() -> None:
    """Install every hook of `HOOKS`; called from the plugin entry point in each process."""
    for hook in HOOKS:
        hook.install()


def verify_installed() -> None:
    """Check that every hook of `HOOKS` is what SGLang will run.

    Raises:
        AdaSpecError: a replacement is not in effect; serving would crash or, worse, sample wrongly.
    """
    missing = [hook.target for hook in HOOKS if not hook.in_effect()]
    if missing:
        raise AdaSpecError(
            f"The CPU platform cannot serve: its replacement of {', '.join(missing)} is not in "
            "effect; check that SGLANG_PLUGINS does not leave out 'adaspec', and look above for "
            "the exception of a plugin."
        )


def _resolve(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)
