"""Weights of a small transformer inside the matrices of a large one, without changing a result.

A hidden state ``x`` of the small model becomes ``[x, 0]``. What keeps it so, and equal:

- rows that write to the padded part of the residual stream are zero;
- RMSNorm divides by the root of a mean over more elements, so its weight is scaled by
  ``√(small / large)`` and its epsilon by ``small / large``;
- head dimensions keep their RoPE frequency: dimension ``i`` of each half goes to ``i · large /
  small`` of it; queries are scaled by ``√(large / small)`` against the larger ``√head_dim``;
- extra heads and MLP units are read by nothing: their columns of ``o_proj`` and ``down_proj`` are
  zero, and so are both matrices of extra layers.

All other new entries multiply zeros or are read by nothing. They are random, not zero: a GPU
multiplies zeros with less power, and so faster, than weights.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adaspec.errors import AdaSpecError

_STD = 0.02  # of random entries


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the cost of a transformer depends on; names as in a Hugging Face configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


# Llama 3.1 8B but for its vocabulary, and the published DFlash drafters of 8B targets.
LLAMA_8B = Shape(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
DFLASH_8B = Shape(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


class Inflation:
    """Places the weights of one shape in matrices of another.

    Args:
        small: of the weights at hand.
        large: to be filled.
        device: where matrices are made.
        dtype: of what is returned.

    Raises:
        AdaSpecError: if the small model does not fit.
    """

    def __init__(
        self, small: Shape, large: Shape, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.small, self.large = small, large
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self._group = small.num_attention_heads // small.num_key_value_heads
        self._large_group = large.num_attention_heads // large.num_key_value_heads
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers"):
            if getattr(large, name) < getattr(small, name):
                raise AdaSpecError(f"{name} {getattr(large, name)} is below the model's own.")
        if large.head_dim % small.head_dim:
            raise AdaSpecError(
                f"head_dim {large.head_dim} is no multiple of {small.head_dim}, so its RoPE has "
                "other frequencies; choose a multiple."
            )
        if large.num_key_value_heads < small.num_key_value_heads or self._large_group < self._group:
            raise AdaSpecError(
                f"{large.num_attention_heads} query heads on {large.num_key_value_heads} key heads "
                f"do not hold {small.num_attention_heads} on {small.num_key_value_heads}; choose "
                "more of both."
            )

    @property
    def eps_scale(self) -> float:
        """Factor on the epsilon of norms over the hidden size."""
        return self.small.hidden_size / self.large.hidden_size

    def hidden_norm(self, weight: Tensor) -> Tensor:
        """Weight of a norm over hidden states, ``[small hidden]`` to ``[large hidden]``."""
        return self._vector(weight * math.sqrt(self.eps_scale), self.large.hidden_size)

    def head_norm(self, weight: Tensor, *, is_query: bool) -> Tensor:
        """Weight of a norm over a head, ``[small head_dim]`` to ``[large head_dim]``."""
        ratio = self.small.head_dim / self.large.head_dim
        # Both norms divide by a smaller root. The larger √head_dim takes the query's factor back.
        scaled = weight if is_query else weight * math.sqrt(ratio)
        placed = torch.zeros(self.large.head_dim, dtype=self._dtype, device=self._device)
        placed[self._dims().to(self._device)] = scaled.to(self._device, self._dtype)
        return placed

    def embedding(self, weight: Tensor) -> Tensor:
        """``[vocab, small hidden]`` to ``[vocab, large hidden]``, zeros behind."""
        wide = torch.zeros(len(weight), self.large.hidden_size, dtype=self._dtype)
        wide[:, : weight.shape[1]] = weight.to(self._dtype)
        return wide

    def layer(self, weights: dict[str, Tensor], *, has_head_norms: bool) -> dict[str, Tensor]:
        """The weights of one layer, by their name in it."""
        hidden = torch.arange(self.small.hidden_size)
        units = torch.arange(self.small.intermediate_size)
        queries, keys = self._query_rows(), self._key_rows()
        scale = 1.0 if has_head_norms else math.sqrt(self.large.head_dim / self.small.head_dim)
        wide, tall = self.large.hidden_size, self.large.intermediate_size
        query_width = self.large.num_attention_heads * self.large.head_dim
        key_width = self.large.num_key_value_heads * self.large.head_dim
        made = {
            "self_attn.q_proj": self._read(
                weights["self_attn.q_proj"] * scale, queries, query_width, hidden, wide
            ),
            "self_attn.k_proj": self._read(
                weights["self_attn.k_proj"], keys, key_width, hidden, wide
            ),
            "self_attn.v_proj": self._read(
                weights["self_attn.v_proj"], keys, key_width, hidden, wide
            ),
            "self_attn.o_proj": self._write(weights["self_attn.o_proj"], queries, query_width),
            "mlp.gate_proj": self._read(weights["mlp.gate_proj"], units, tall, hidden, wide),
            "mlp.up_proj": self._read(weights["mlp.up_proj"], units, tall, hidden, wide),
            "mlp.down_proj": self._write(weights["mlp.down_proj"], units, tall),
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[name] = self.hidden_norm(weights[name])
        if has_head_norms:
            for name in ("q_norm", "k_norm"):
                weight = weights[f"self_attn.{name}"]
                made[f"self_attn.{name}"] = self.head_norm(weight, is_query=name == "q_norm")
        return made

    def context_projection(self, weight: Tensor, taps: int) -> Tensor:
        """A drafter's ``fc``, ``[small hidden, taps · small hidden]``."""
        small, large = self.small.hidden_size, self.large.hidden_size
        columns = torch.cat([tap * large + torch.arange(small) for tap in range(taps)])
        return self._write(weight, columns, taps * large, read_by_zeros=True)

    def empty_layer(self) -> dict[str, Tensor]:
        """A layer that adds zero."""
        s = self.small
        queries = torch.zeros(s.num_attention_heads * s.head_dim, s.hidden_size)
        keys = torch.zeros(s.num_key_value_heads * s.head_dim, s.hidden_size)
        units = torch.zeros(s.intermediate_size, s.hidden_size)
        return self.layer(
            {
                "self_attn.q_proj": queries,
                "self_attn.k_proj": keys,
                "self_attn.v_proj": keys,
                "self_attn.o_proj": queries.T,
                "mlp.gate_proj": units,
                "mlp.up_proj": units,
                "mlp.down_proj": units.T,
                "input_layernorm": torch.ones(s.hidden_size),
                "post_attention_layernorm": torch.ones(s.hidden_size),
            },
            has_head_norms=False,
        )

    def _dims(self) -> Tensor:
        """Where the dimensions of a small head lie in a large one."""
        half, stride = self.small.head_dim // 2, self.large.head_dim // self.small.head_dim
        first = torch.arange(half) * stride
        return torch.cat([first, first + self.large.head_dim // 2])

    def _query_rows(self) -> Tensor:
        heads = torch.arange(self.small.num_attention_heads)
        placed = heads // self._group * self._large_group + heads % self._group
        return (placed[:, None] * self.large.head_dim + self._dims()).flatten()

    def _key_rows(self) -> Tensor:
        heads = torch.arange(self.small.num_key_value_heads)
        return (heads[:, None] * self.large.head_dim + self._dims()).flatten()

    def _vector(self, weight: Tensor, width: int) -> Tensor:
        wide = torch.zeros(width, dtype=self._dtype, device=self._device)
        wide[: len(weight)] = weight.to(self._device, self._dtype)
        return wide

    def _random(self, rows: int, columns: int) -> Tensor:
        matrix = torch.empty(rows, columns, dtype=self._dtype, device=self._device)
        return matrix.normal_(std=_STD, generator=self._generator)

    def _place(self, matrix: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> None:
        at = (rows.to(self._device)[:, None], columns.to(self._device))
        matrix[at] = weight.to(self._device, self._dtype)

    def _read(
        self, weight: Tensor, rows: Tensor, height: int, columns: Tensor, width: int
    ) -> Tensor:
        """A matrix that reads hidden states. Within a head that is used, unused rows are zero."""
        matrix = self._random(height, width)
        if weight.shape[0] != self.small.intermediate_size:
            dim = self.large.head_dim
            for head in (rows // dim).unique().tolist():
                matrix[head * dim : (head + 1) * dim] = 0
        self._place(matrix, weight, rows, columns)
        return matrix

    def _write(
        self, weight: Tensor, columns: Tensor, width: int, *, read_by_zeros: bool = False
    ) -> Tensor:
        """A matrix that writes hidden states; what reads unused columns is zero."""
        rows = torch.arange(self.small.hidden_size)
        matrix = torch.zeros(self.large.hidden_size, width, dtype=self._dtype, device=self._device)
        if read_by_zeros:
            matrix[: len(rows)] = self._random(len(rows), width)
        self._place(matrix, weight, rows, columns)
        return matrix
