"""A tiny random target, and a server that is only its bookkeeping."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from adaspec.acceptance import prefix_length
from adaspec.drafters.config import DrafterConfig
from adaspec.drafters.network import BlockDrafter
from adaspec.feedback import (
    EndCapture,
    FeedbackCollector,
    HiddenTeacher,
    PrefillCapture,
    Record,
    StepCapture,
    Teacher,
    TopKTeacher,
)

LINEAGE = "0123456789abcdef"
VOCAB, MASK = 48, 47
DRAFTER = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=VOCAB,
    block_size=6,
    mask_token_id=MASK,
    target_layer_ids=(0, 2),
    num_target_layers=4,
)


def save_target(directory: Path, seed: int = 0) -> Path:
    """A random Llama with tied embeddings whose greedy continuations are not constant."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=DRAFTER.hidden_size,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.25,
        )
    )
    model.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Request:
    """A greedy request and everything the target computed for it, row by position."""

    name: str
    prompt_length: int
    tokens: Tensor
    taps: Tensor
    hidden: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


class TinyTarget:
    """Reads and continues token sequences."""

    def __init__(self, directory: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(directory).eval()
        self.embedding: Tensor = self.model.get_input_embeddings().weight.detach()
        self.lm_head: Tensor = self.model.lm_head.weight.detach()

    def request(self, name: str, prompt: Sequence[int], new_tokens: int = 24) -> Request:
        return self.requests({name: prompt}, new_tokens)[0]

    @torch.no_grad()
    def requests(self, prompts: Mapping[str, Sequence[int]], new_tokens: int = 24) -> list[Request]:
        """Greedy responses to prompts of one length."""
        tokens = torch.tensor(list(prompts.values()))  # [requests, length]
        for _ in range(new_tokens):
            following = self.model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        output = self.model(tokens, output_hidden_states=True)
        states = output.hidden_states
        taps = torch.cat([states[layer + 1] for layer in DRAFTER.target_layer_ids], dim=-1)
        prompt_length = tokens.shape[1] - new_tokens
        return [
            Request(name, prompt_length, tokens[i], taps[i], states[-1][i], output.logits[i])
            for i, name in enumerate(prompts)
        ]


def random_prompt(generator: torch.Generator, length: int = 6) -> list[int]:
    return torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()


def teacher_of(request: Request, kind: str, positions: Tensor) -> Teacher:
    if kind == "hidden":
        return HiddenTeacher(request.hidden[positions])
    logits = request.logits[positions]
    top = logits.topk(8)
    return TopKTeacher(top.values, top.indices.int(), logits.logsumexp(-1).float())


def captures(
    request: Request,
    drafter: BlockDrafter,
    target: TinyTarget,
    kind: str = "top-k",
    cached: int = 0,
    chunk: int | None = None,
    version: int = 0,
) -> list[PrefillCapture | StepCapture | EndCapture]:
    """What a server would capture while it serves the request with this drafter."""
    made: list[PrefillCapture | StepCapture | EndCapture] = []
    prompt = request.tokens[: request.prompt_length].tolist()
    chunk = chunk or len(prompt)
    for start in range(cached, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        made.append(
            PrefillCapture(
                [request.name], version, [prompt[:end]], [start], request.taps[start:end]
            )
        )
    width = drafter.config.block_size
    anchor = request.prompt_length
    while anchor + width < len(request):
        rows = torch.arange(anchor, anchor + width)
        logits = drafter.draft(
            request.taps[:anchor], int(request.tokens[anchor]), target.embedding, target.lm_head
        )
        drafts = logits[1:].argmax(-1)
        accepted = int(prefix_length((drafts == request.tokens[rows[1:]])[None])[0])
        teacher = teacher_of(request, kind, rows)
        made.append(
            StepCapture(
                [request.name],
                version,
                [0.0],
                torch.tensor([anchor]),
                torch.cat([request.tokens[anchor : anchor + 1], drafts])[None],
                torch.tensor([accepted]),
                request.tokens[anchor + accepted + 1][None],
                request.taps[rows][None],
                teacher,
            )
        )
        anchor += accepted + 1
    made.append(EndCapture(request.name, anchor + 1))
    return made


class RecordingSender:
    """Takes a sender's place and keeps the records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def wants(self, request: str) -> bool:
        return True

    def offer(self, record: Record) -> bool:
        self.records.append(record)
        return True

    def close(self) -> None:
        pass


def records_of(
    made: Sequence[PrefillCapture | StepCapture | EndCapture], **options: object
) -> list[Record]:
    """The records a collector makes of captures."""
    sender = RecordingSender()
    collector = FeedbackCollector(sender, LINEAGE, **options)
    for capture in made:
        collector.submit(capture)
    collector.close()
    return sender.records
