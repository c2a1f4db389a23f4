"""A tiny drafter that is often right: fitted to what the tiny target says after given prompts.

A random drafter is refused at once, which would leave acceptance, the commit of several tokens and
the draft cache untested.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from adaspec.drafters.blocks import block_token_ids
from adaspec.drafters.checkpoint import save_drafter
from adaspec.drafters.config import DrafterConfig
from adaspec.drafters.network import BlockDrafter
from tests.server import tiny_models as tiny


@torch.enable_grad()
def write_fitted_drafter(
    directory: Path,
    target: Path,
    prompts: Sequence[list[int]],
    *,
    length: int = 24,
    temperature: float = 0.0,
    copies: int = 1,
    block_size: int = 6,
    steps: int = 250,
) -> Path:
    """Overfit a drafter on continuations of ``prompts`` (``copies`` each, sampled if hot)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    rows = torch.tensor([prompt for prompt in prompts for _ in range(copies)])
    start = rows.shape[1]
    with torch.no_grad():
        for _ in range(length):
            logits = model(rows).logits[:, -1]
            if temperature:
                following = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                following = logits.argmax(-1, keepdim=True)
            rows = torch.cat([rows, following], dim=1)
        states = model(rows, output_hidden_states=True).hidden_states
        taps = torch.cat([states[layer + 1] for layer in tiny.TAPS], dim=-1)
    drafter = BlockDrafter(_config(block_size))
    embedding = model.get_input_embeddings().weight.detach()
    lm_head = model.lm_head.weight.detach()
    anchors = torch.arange(start, rows.shape[1] - block_size + 1).expand(rows.shape[0], -1)
    inputs = block_token_ids(rows.gather(1, anchors), block_size, tiny.MASK)
    columns = anchors[..., None] + torch.arange(1, block_size)
    labels = rows[:, None].expand(-1, anchors.shape[1], -1).gather(2, columns)
    optimiser = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(steps):
        hidden = drafter.forward_blocks(
            drafter.context_features(taps), anchors, F.embedding(inputs, embedding)
        )
        scores = F.linear(hidden[:, :, 1:], lm_head)
        loss = F.cross_entropy(scores.flatten(0, -2), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_drafter(drafter, directory, dtype=torch.float32)
    return directory


def _config(block_size: int) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=tiny.HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=tiny.HEADS,
        num_key_value_heads=tiny.KV_HEADS,
        head_dim=tiny.HEAD_DIM,
        vocab_size=tiny.VOCAB_SIZE,
        block_size=block_size,
        mask_token_id=tiny.MASK,
        target_layer_ids=tiny.TAPS,
        num_target_layers=tiny.LAYERS,
    )
