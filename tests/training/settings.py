"""The smallest useful training configuration."""

from typing import Any

import msgspec

from adaspec.training.config import TrainConfig
from tests.server.tiny_models import MASK, TAPS

BASE: dict[str, Any] = {
    "drafter": {
        "block_size": 4,
        "num_layers": 1,
        "intermediate_size": 64,
        "target_layer_ids": list(TAPS),
        "mask_token_id": MASK,
    },
    "generate": {"max_new_tokens": 24, "batch_rows": 8, "cache_tokens": 2048},
    "optim": {"max_steps": 6},
    "data": {"tokens_per_batch": 256, "blocks_per_batch": 48},
    "log_every": 1,
    "evaluate_every": 4,
    "checkpoint_every": 3,
}


def settings(**changes: Any) -> dict[str, Any]:
    """Plain values, as a TOML file holds them; sections are merged key by key."""
    merged = dict(BASE)
    for key, value in changes.items():
        merged[key] = {**BASE.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


def config(**changes: Any) -> TrainConfig:
    return msgspec.convert(settings(**changes), TrainConfig)
