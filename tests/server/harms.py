"""What may be wrong inside a learner's process; see `ForkedLearner`."""

import ctypes
import resource
from typing import Any

import psutil
import torch

# linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE = 1


def break_gradients(first: int, last: int) -> None:
    """Make the gradients of these steps NaN, as a broken device might."""
    from online.trainer import StepReport, Trainer

    step = Trainer.step

    def broken(trainer: Trainer, batch: Any) -> StepReport:
        if not first <= trainer.steps + trainer.skipped_steps <= last:
            return step(trainer, batch)
        hook = trainer.drafter.norm.weight.register_hook(lambda g: g * torch.nan)
        try:
            return step(trainer, batch)
        finally:
            hook.remove()

    Trainer.step = broken  # type: ignore[method-assign]


def obey_permissions() -> None:
    """Let permission bits bind this process as they bind all others, should it be root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget failed")
    sets[0] &= ~(1 << _CAP_DAC_OVERRIDE)
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def run_out_of_memory(owner: type, method: str, calls: int) -> None:
    """From a call of a method on the process may have no more memory, and asks for some."""
    original = getattr(owner, method)
    left = calls

    def starved(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left > 0:
            return original(*args, **kwargs)
        most = psutil.Process().memory_info().vms + (16 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        torch.empty(64 << 20, dtype=torch.uint8)
        raise AssertionError("there was memory")

    setattr(owner, method, starved)
