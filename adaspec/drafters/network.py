"""The block-diffusion drafter in plain PyTorch.

Semantics and tensor names follow z-lab DFlash (arXiv 2602.06036) as SGLang serves it
(``sglang.srt.models.dflash.DFlashDraftModel``):

- context feature of a committed token = ``hidden_norm(fc(concat of its taps))``;
- in every layer, the context's keys and values are ``k_proj``/``v_proj`` of that feature itself (it
  does *not* pass through ``input_layernorm``), the block's are made from its normed states;
- queries come from the block only; attention inside the block is bidirectional; a block sees the
  context strictly before its anchor and no other block;
- RoPE at absolute positions on queries and keys, after QK-norm.

Embedding and output matrix are the target's and are passed in.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adaspec.drafters.blocks import block_position_ids, block_token_ids
from adaspec.drafters.config import DrafterConfig
from adaspec.drafters.heads import LengthHead

Rotation = tuple[Tensor, Tensor]


class Surroundings(NamedTuple):
    """What the blocks of one forward pass stand in; the same for every layer.

    Attributes:
        context: ``[batch, context, hidden]``, context features.
        visible: bool ``[batch, blocks, context]``, context positions a block may see.
        block_rotation: cosines and sines ``[batch, blocks, block, head_dim]``.
        context_rotation: cosines and sines ``[context, head_dim]``.
    """

    context: Tensor
    visible: Tensor
    block_rotation: Rotation
    context_rotation: Rotation


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the input's type."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; the input's dtype is kept."""
        width = (x.shape[-1],)
        return F.rms_norm(x.float(), width, self.weight.float(), self.eps).to(x.dtype)


class BlockAttention(nn.Module):
    """Attention of many draft blocks over one shared context and, each, over itself."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.group = config.num_attention_heads // config.num_key_value_heads
        hidden, query_width = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, query_width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, states: Tensor, around: Surroundings) -> Tensor:
        """Attend from normed block states ``[batch, blocks, block, hidden]``."""
        context, visible, block_rotation, context_rotation = around
        batch, blocks, size, _ = states.shape
        length = context.shape[1]
        kv, group, dim = self.kv_heads, self.group, self.head_dim

        query = self.q_norm(self.q_proj(states).unflatten(-1, (kv * group, dim)))
        query = _rotate(query, _per_head(block_rotation))
        query = query.view(batch, blocks, size, kv, group, dim)
        block_key = _rotate(
            self.k_norm(self.k_proj(states).unflatten(-1, (kv, dim))), _per_head(block_rotation)
        )
        block_value = self.v_proj(states).unflatten(-1, (kv, dim))
        key = _rotate(
            self.k_norm(self.k_proj(context).unflatten(-1, (kv, dim))), _per_head(context_rotation)
        )
        value = self.v_proj(context).unflatten(-1, (kv, dim))

        # [batch, kv, blocks, group * block, dim]: the queries that share one key head, by block.
        query = query.permute(0, 3, 1, 4, 2, 5).reshape(batch, kv, blocks, group * size, dim)
        query = query * dim**-0.5
        rows = blocks * group * size
        seen = torch.matmul(query.view(batch, kv, rows, dim), key.permute(0, 2, 3, 1))
        seen = seen.view(batch, kv, blocks, group * size, length)
        seen = seen.masked_fill(~visible[:, None, :, None, :], float("-inf"))
        own = torch.matmul(query, block_key.permute(0, 3, 1, 4, 2))  # [.., group * block, block]

        weight = torch.softmax(torch.cat([seen, own], dim=-1), dim=-1, dtype=torch.float32)
        weight = weight.to(value.dtype)
        from_context = torch.matmul(
            weight[..., :length].reshape(batch, kv, rows, length), value.transpose(1, 2)
        )
        mixed = from_context.view(batch, kv, blocks, group * size, dim) + torch.matmul(
            weight[..., length:], block_value.permute(0, 3, 1, 2, 4)
        )
        mixed = mixed.view(batch, kv, blocks, group, size, dim).permute(0, 2, 4, 1, 3, 5)
        output: Tensor = self.o_proj(mixed.reshape(batch, blocks, size, kv * group * dim))
        return output


class GatedMLP(nn.Module):
    """SiLU-gated feed-forward layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``down(silu(gate(x)) * up(x))``."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DrafterLayer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, states: Tensor, around: Surroundings) -> Tensor:
        """Update the residual stream ``[batch, blocks, block, hidden]``."""
        states = states + self.self_attn(self.input_layernorm(states), around)
        updated: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return updated


class BlockDrafter(nn.Module):
    """A DFlash drafter: all positions of a block are predicted in one pass."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.context_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.thresh_head_two_model: LengthHead | None = None
        if config.length_head_width is not None:
            self.thresh_head_two_model = LengthHead(config.hidden_size, config.length_head_width)

    def body_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters but the length head's."""
        head = self.thresh_head_two_model
        of_head = set() if head is None else set(head.parameters())
        return (p for p in self.parameters() if p not in of_head)

    def context_features(self, taps: Tensor) -> Tensor:
        """Project the concatenated taps of committed tokens.

        Args:
            taps: ``[..., taps * hidden]``, outputs of the tapped target layers, in config order.

        Returns:
            ``[..., hidden]``.
        """
        features: Tensor = self.hidden_norm(self.fc(taps))
        return features

    def forward_blocks(self, context: Tensor, anchors: Tensor, noise: Tensor) -> Tensor:
        """Denoise many blocks over shared contexts.

        Args:
            context: ``[batch, context, hidden]``, context features; row ``p`` is position ``p``.
            anchors: int64 ``[batch, blocks]``, position of each block's anchor. The block sees the
                context rows before it; rows at or after every anchor may hold any finite number.
            noise: ``[batch, blocks, block, hidden]``, target embeddings of ``[anchor, MASK, ...]``.

        Returns:
            Final normed states ``[batch, blocks, block, hidden]``; the row of position ``k``
            predicts the token at ``anchor + k``.
        """
        config = self.config
        length = context.shape[1]
        positions = torch.arange(length, device=context.device)
        around = Surroundings(
            context,
            visible=positions < anchors[..., None],
            block_rotation=_rotation(block_position_ids(anchors, noise.shape[-2]), config),
            context_rotation=_rotation(positions, config),
        )
        states = noise
        for layer in self.layers:
            states = layer(states, around)
        final: Tensor = self.norm(states)
        return final

    @torch.no_grad()
    def draft(self, taps: Tensor, anchor_token: int, embedding: Tensor, lm_head: Tensor) -> Tensor:
        """Logits of one draft block after a committed prefix.

        Args:
            taps: ``[prefix, taps * hidden]``, taps of the committed tokens before the anchor.
            anchor_token: the last committed token, which the target has not read yet.
            embedding: the target's input embedding ``[vocab, hidden]``.
            lm_head: the target's output matrix ``[vocab, hidden]``.

        Returns:
            ``[block, vocab]``; row 0 belongs to the anchor and is not used, row ``k`` predicts the
            ``k``-th token after it.
        """
        context = self.context_features(taps)[None]
        anchors = torch.tensor([[taps.shape[0]]], device=taps.device)
        tokens = block_token_ids(
            torch.tensor([[anchor_token]], device=taps.device),
            self.config.block_size,
            self.config.mask_token_id,
        )
        hidden = self.forward_blocks(context, anchors, F.embedding(tokens, embedding))
        return F.linear(hidden[0, 0], lm_head)


def _rotation(positions: Tensor, config: DrafterConfig) -> Rotation:
    """Cosines and sines ``[*positions.shape, head_dim]`` in float32, halves repeated (NeoX)."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * config.rope_theta ** -(half / config.head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _per_head(rotation: Rotation) -> Rotation:
    return rotation[0].unsqueeze(-2), rotation[1].unsqueeze(-2)


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cosine + turned * sine).to(x.dtype)
