"""Reading tokens off a draft block inside the draft pass's CUDA graph, with how sure they are."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.speculative.dflash_worker_v2 import _DflashDraftSampler


def most_probable(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 ``[rows]`` and their log-probabilities float32 ``[rows]``.

    Args:
        logits: ``[rows, vocab]``.
    """
    if logits.is_cuda:
        from sglang_patches.worker.draft_kernel import read_off

        return read_off(logits)
    highest, tokens = logits.max(dim=-1)
    return tokens, highest.float() - logits.float().logsumexp(dim=-1)


class ConfidentDraftSampler:
    """Upstream's ``_DflashDraftSampler`` for one rank, which also keeps log-probabilities.

    Args:
        stock: the sampler that upstream would capture.

    Attributes:
        out: int64 ``[most rows]``, the drafted tokens.
        log_probs: float32 ``[most rows]``, their log-probabilities under the drafter.
    """

    def __init__(self, stock: "_DflashDraftSampler") -> None:
        self._weight = stock.weight[: stock.num_org]  # [vocab, hidden]
        self._block_size = stock.block_size
        self.out = stock.out
        self.log_probs = torch.zeros(len(self.out), dtype=torch.float32, device=self.out.device)

    def __call__(self, hidden: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        """Fill ``out`` and ``log_probs`` from draft hidden states ``[batch · block, hidden]``."""
        blocks = hidden.view(-1, self._block_size, hidden.shape[-1])
        rows = blocks[:, 1:].reshape(-1, hidden.shape[-1]).to(self._weight.dtype)
        logits = rows @ self._weight.T  # [rows, vocab]
        tokens, log_probs = most_probable(logits)
        self.out[: len(rows)].copy_(tokens)
        self.log_probs[: len(rows)].copy_(log_probs)
