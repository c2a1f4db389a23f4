"""What the model itself says, computed with transformers: the yardstick of the server tests."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

Adjust = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]
"""(logits ``[vocab]``, prompt ids, output ids) to adjusted logits, as a penalty does."""


class ReferenceModel:
    """Float32 greedy decoding and exact next-token distributions."""

    def __init__(self, directory: Path) -> None:
        """Load the model of an HF directory."""
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Next-token logits after ``ids``, ``[vocab]`` float32."""
        return self.model(torch.tensor([ids])).logits[0, -1]

    def greedy(self, prompt: list[int], length: int, adjust: Adjust | None = None) -> list[int]:
        """``length`` greedy tokens; end-of-sequence does not stop it."""
        output: list[int] = []
        for _ in range(length):
            logits = self.logits(prompt + output)
            if adjust is not None:
                logits = adjust(logits.clone(), prompt, output)
            output.append(int(logits.argmax()))
        return output

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], output: list[int]) -> list[float]:
        """Log-probability of each token of ``output`` given what stands before it."""
        rows = self.model(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
        start = len(prompt) - 1
        return [float(rows[start + i, token]) for i, token in enumerate(output)]

    def top_k_law(self, ids: list[int], k: int) -> dict[int, float]:
        """Next-token distribution at temperature 1 cut to the ``k`` likeliest tokens."""
        values, tokens = self.logits(ids).topk(k)
        return dict(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))
