"""Optional heads on top of the drafter."""

import torch
from torch import Tensor, nn


class LengthHead(nn.Module):
    """AdaFlash's adaptive-length head (arXiv 2607.19223).

    Reads the final normed hidden states of a drafted block and predicts the share of the block that
    is worth verifying. Checkpoints name it ``thresh_head_two_model``.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(2 * hidden_size, width)
        self.res = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 1)

    def forward(self, block_hidden: Tensor) -> Tensor:
        """Predicted share of each block.

        Args:
            block_hidden: ``[..., block, hidden]``, final normed drafter states.

        Returns:
            ``[...]``, between 0 and 1.
        """
        summary = torch.cat([block_hidden.mean(-2), block_hidden[..., -1, :]], dim=-1)
        bottleneck = nn.functional.silu(self.down(summary))
        bottleneck = bottleneck + self.res(bottleneck)
        share: Tensor = torch.sigmoid(self.out(bottleneck)).squeeze(-1)
        return share
