"""Penalties inside a block equal those of plain decoding, token by token."""

from dataclasses import dataclass, field

import pytest
import torch

from adaspec.chains import ChainRows
from sglang_patches.worker.history import OutputHistory

VOCAB = 12
EOS = 2


@dataclass
class Params:
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: set[int] | None = None


@dataclass
class Request:
    """The fields of SGLang's Req that the history reads."""

    rid: str
    sampling_params: Params
    output_ids: list[int] = field(default_factory=list)
    eos_token_ids: set[int] = field(default_factory=lambda: {EOS})
    tokenizer: None = None
    done: bool = False

    def finished(self) -> bool:
        return self.done


def plain(logits: torch.Tensor, outputs: list[int], params: Params) -> torch.Tensor:
    """SGLang's penalties after ``outputs``: additive first, then scaling. [vocab] float64."""
    row = logits.double().clone()
    for token in set(outputs):
        row[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    if len(outputs) < params.min_new_tokens:
        row[EOS] = float("-inf")
    for token in set(outputs):
        scale = params.repetition_penalty
        row[token] = row[token] * scale if row[token] < 0 else row[token] / scale
    return row


PENALTIES = [
    Params(frequency_penalty=0.7),
    Params(presence_penalty=1.3),
    Params(repetition_penalty=1.4),
    Params(min_new_tokens=4),
    Params(0.3, -0.4, 1.2, 6),
]


def layout(lengths: list[int], *, width: int, ragged: bool) -> ChainRows:
    if not ragged:
        return ChainRows.uniform(len(lengths), width, torch.device("cpu"))
    return ChainRows.ragged(torch.tensor(lengths), sum(lengths), width)


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_every_column_is_penalised_as_plain_decoding_would(params: Params, ragged: bool) -> None:
    torch.manual_seed(0)
    history = OutputHistory(VOCAB, "cpu")
    reqs = [Request("free", Params()), Request("a", params), Request("b", params)]
    outputs: list[list[int]] = [[], [], []]
    first = torch.tensor([3, 4, 4])
    history.observe_prefill(reqs, first)  # type: ignore[arg-type]
    for row, token in zip(outputs, first.tolist(), strict=True):
        row.append(token)
    for _ in range(4):
        tokens = torch.cat(
            [torch.tensor([[row[-1]] for row in outputs]), torch.randint(0, VOCAB, (3, 3))], dim=1
        )
        rows = layout(torch.randint(1, 5, (3,)).tolist(), width=4, ragged=ragged)
        logits = torch.randn(rows.total, VOCAB)
        before = logits.clone()
        history.apply_penalties(reqs, logits, tokens, rows)  # type: ignore[arg-type]
        for row, (r, column) in enumerate(
            zip(rows.chain.tolist(), rows.column.tolist(), strict=True)
        ):
            seen = outputs[r] + tokens[r, 1 : column + 1].tolist()
            expected = plain(before[row], seen, reqs[r].sampling_params)
            torch.testing.assert_close(logits[row].double(), expected, rtol=1e-5, atol=1e-5)
        committed = torch.randint(0, VOCAB, (3, 4))
        commit_lens = torch.randint(1, 5, (3,), dtype=torch.int32)
        history.observe_commit(reqs, committed, commit_lens)  # type: ignore[arg-type]
        for row, new, count in zip(outputs, committed.tolist(), commit_lens.tolist(), strict=True):
            row.extend(new[:count])


def test_requests_without_penalties_are_untouched() -> None:
    history = OutputHistory(VOCAB, "cpu")
    reqs = [Request("a", Params())]
    history.observe_prefill(reqs, torch.tensor([1]))  # type: ignore[arg-type]
    logits, rows = torch.randn(2, VOCAB), layout([2], width=2, ragged=False)
    before = logits.clone()
    history.apply_penalties(reqs, logits, torch.tensor([[1, 5]]), rows)  # type: ignore[arg-type]
    assert torch.equal(logits, before)


def test_a_retracted_request_continues_from_its_outputs() -> None:
    history = OutputHistory(VOCAB, "cpu")
    request = Request("a", Params(frequency_penalty=1.0))
    history.observe_prefill([request], torch.tensor([5]))  # type: ignore[list-item]
    history.observe_commit([request], torch.tensor([[6, 7]]), torch.tensor([2]))  # type: ignore[list-item]
    request.output_ids = [5, 6]  # the last step's result was dropped by the retraction
    history.observe_prefill([request], torch.tensor([8]))  # type: ignore[list-item]
    logits, rows = torch.zeros(1, VOCAB), layout([1], width=1, ragged=False)
    history.apply_penalties([request], logits, torch.tensor([[8]]), rows)  # type: ignore[list-item]
    assert logits.nonzero()[:, 1].tolist() == [5, 6, 8]


def test_finished_requests_give_their_rows_back() -> None:
    history = OutputHistory(VOCAB, "cpu")
    for number in range(50):
        request = Request(str(number), Params(presence_penalty=1.0))
        history.observe_prefill([request], torch.tensor([1]))  # type: ignore[list-item]
        request.done = True
    assert history.rows_reserved <= 8
