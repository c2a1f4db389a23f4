"""Out-of-tree SGLang platform for the host CPU, in plain PyTorch (no sgl_kernel, no Triton)."""

import os

import torch

from adaspec.errors import AdaSpecError

PLATFORM_NAME = "adaspec_cpu"
"""Entry-point name in group ``sglang.srt.platforms``; the value ``SGLANG_PLATFORM`` selects."""


def activate() -> str | None:
    """Offer the CPU platform to SGLang, unless the machine has an accelerator.

    Upstream (``sglang.srt.platforms._resolve_platform``) calls every platform entry point when
    ``SGLANG_PLATFORM`` is unset, and one that returns a class name wins over CUDA: so None is
    returned wherever an accelerator can be used, and when ``SGLANG_USE_CPU_ENGINE=1`` asks for
    SGLang's own CPU engine. A named request is honoured or refused, never ignored.

    Returns:
        The dotted name of the platform class, or None to leave the choice to SGLang.

    Raises:
        AdaSpecError: the platform was asked for by name while an accelerator is visible. SGLang
            picks kernels by ``torch.cuda.is_available()`` in many modules, so a CPU platform
            next to a visible GPU would mix the two.
    """
    named = os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME
    if _accelerator_present():
        if named:
            raise AdaSpecError(
                f"SGLANG_PLATFORM={PLATFORM_NAME} asks for the CPU but an accelerator is visible; "
                "hide it as well, for a CUDA GPU with CUDA_VISIBLE_DEVICES= (empty)."
            )
        return None
    if not named and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None

    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices

    add_draft_attention_backend_choices(["torch_native"])
    return "sglang_patches.cpu.platform.AdaSpecCpuPlatform"


def _accelerator_present() -> bool:
    return torch.cuda.is_available() or torch.accelerator.is_available()
