"""A drafter small enough for unit tests."""

from pathlib import Path

import torch

from adaspec.drafters.checkpoint import save_drafter
from adaspec.drafters.config import DrafterConfig
from adaspec.drafters.network import BlockDrafter

TINY = DrafterConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=40,
    block_size=5,
    mask_token_id=39,
    target_layer_ids=(0, 1),
    num_target_layers=4,
)


def tiny_drafter_directory(
    directory: Path, seed: int = 0, config: DrafterConfig = TINY, dtype: torch.dtype = torch.float32
) -> Path:
    """A random drafter, saved."""
    torch.manual_seed(seed)
    save_drafter(BlockDrafter(config), directory, dtype)
    return directory
