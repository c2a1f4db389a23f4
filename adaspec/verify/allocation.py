"""Sharing out a budget of verified tokens: tensor operations that never wait for the device."""

import torch
from torch import Tensor


def allocate(priority: Tensor, tokens: int) -> Tensor:
    """Verify lengths that use exactly ``tokens`` tokens on the drafts of highest priority.

    With survival probabilities as the priority this maximises the expected commits. As priority
    never rises along a block, and ties go to the earlier position and then to the earlier request,
    the chosen drafts are a prefix of each block, and every rank of a tensor-parallel group that
    holds the same numbers chooses the same. Upstream: SGLang ``ScheduleVerifyLensTopk``.

    Args:
        priority: ``[batch, drafts]``, not increasing along the block, no NaN.
        tokens: anchors included; clamped to what the batch can use.

    Returns:
        int32 ``[batch]``, each 1 to ``drafts + 1``.
    """
    batch, drafts = priority.shape
    extra = min(max(tokens - batch, 0), batch * drafts)
    if priority.is_cuda:
        from adaspec.verify.allocation_kernel import allocate_in_one_launch

        return allocate_in_one_launch(priority, extra)
    lengths = torch.ones(batch, dtype=torch.int32, device=priority.device)
    by_position = priority.T.reshape(-1)  # [drafts · batch]
    chosen = by_position.sort(descending=True, stable=True).indices[:extra]
    return lengths.scatter_add_(0, chosen % batch, lengths.new_ones(1).expand(extra))


def uniform_lengths(batch: int, width: int, device: torch.device) -> Tensor:
    """The same length for every request: int32 ``[batch]``."""
    return torch.full((batch,), width, dtype=torch.int32, device=device)
