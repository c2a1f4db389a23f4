"""The target as a transformers model: what training reads from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adaspec.errors import AdaSpecError

_ATTENTION = "adaspec_grouped"


def _grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """SDPA that reads each key head once when one token is decoded.

    transformers' own path repeats the keys for every query head whenever there is a mask, which
    triples the cache traffic of a 9-head, 3-key-head model.
    """
    batch, heads, length, dim = query.shape
    if length > 1:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output, _ = sdpa(module, query, key, value, attention_mask, **options)
        return output, None
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    mixed = F.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return mixed.reshape(batch, 1, heads, dim), None


@dataclass(frozen=True)
class TargetModel:
    """A frozen target.

    Attributes:
        decoder: the transformers model without its output matrix.
        embedding: ``[vocab, hidden]``.
        lm_head: ``[vocab, hidden]``.
        final_norm: weight of the norm before the output matrix, ``[hidden]``.
        config: the transformers configuration.
    """

    decoder: Any
    embedding: Tensor
    lm_head: Tensor
    final_norm: Tensor
    config: Any

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits of final states.

        Rounding to bfloat16 would leave ties: logits near 16 are then 0.125 apart.

        Args:
            hidden: ``[rows, hidden]``.
        """
        if hidden.is_cuda and hidden.dtype == torch.bfloat16:
            # Products of bfloat16 numbers, summed and returned in float32.
            return torch.mm(hidden, self.lm_head.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), self.lm_head.float())

    @torch.no_grad()
    def read(self, tokens: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Taps and final states of trajectories.

        A tap is ``hidden_states[id + 1]``, the residual stream after layer ``id``: what SGLang
        captures for DFlash (``set_dflash_layers_to_capture`` stores ``id + 1`` and captures the
        input of that layer).

        Args:
            tokens: int64 ``[batch, length]``, padded on the right; no mask is needed because
                attention is causal.

        Returns:
            ``(taps, final)``: ``[batch, length, taps * hidden]`` and ``[batch, length, hidden]``.
        """
        output = self.decoder(input_ids=tokens, use_cache=False, output_hidden_states=True)
        taps = torch.cat([output.hidden_states[layer + 1] for layer in layer_ids], dim=-1)
        return taps, output.last_hidden_state

    @torch.no_grad()
    def greedy_tokens(self, final: Tensor, wanted: Tensor, chunk_rows: int = 8192) -> Tensor:
        """The target's argmax for every wanted position.

        Args:
            final: ``[batch, length, hidden]``.
            wanted: bool ``[batch, length]``; position 0 has no prediction.

        Returns:
            int64 ``[batch, length]``; entry ``j`` is the argmax given the tokens before ``j``, or 0
            where it was not wanted.
        """
        tokens = torch.zeros_like(wanted, dtype=torch.long)
        row, column = wanted[:, 1:].nonzero(as_tuple=True)
        states = final[row, column]
        predicted = [self.logits(part).argmax(-1) for part in torch.split(states, chunk_rows)]
        if predicted:
            tokens[row, column + 1] = torch.cat(predicted)
        return tokens


def load_target(directory: Path, device: torch.device, dtype: torch.dtype) -> TargetModel:
    """Load a target directory for training.

    Raises:
        AdaSpecError: if it cannot be loaded or has sliding-window layers.
    """
    if not (directory / "config.json").is_file():
        raise AdaSpecError(f"{directory} is not a model directory: it has no config.json.")
    AttentionInterface.register(_ATTENTION, _grouped_attention)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    except (OSError, ValueError) as error:
        raise AdaSpecError(f"the target {directory} cannot be loaded: {error}") from None
    kinds = getattr(model.config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in kinds):
        raise AdaSpecError(
            f"the target {directory} has layers other than full attention, which training does not "
            "support; use a target with full attention in every layer."
        )
    model.set_attn_implementation(_ATTENTION)
    model.to(device).eval().requires_grad_(False)
    decoder = model.get_decoder()
    return TargetModel(
        decoder=decoder,
        embedding=model.get_input_embeddings().weight,
        lm_head=model.get_output_embeddings().weight,
        final_norm=decoder.norm.weight,
        config=model.config,
    )
