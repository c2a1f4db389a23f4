"""What the tap hands over, and for whom."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from adaspec.chains import ChainRows
from adaspec.feedback import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    FeedbackCollector,
    HiddenTeacher,
    TopKTeacher,
)
from sglang_patches.online.tap import CONSENT, FeedbackTap
from sglang_patches.worker.accept import Verdict
from tests.online.world import LINEAGE, RecordingSender

VOCAB, WIDTH, TAPS, HIDDEN, TOP_K = 40, 3, 6, 4, 5


@dataclass
class Params:
    temperature: float = 1.0
    top_k: int = 1
    custom_params: object = None


@dataclass
class Request:
    """The fields of SGLang's Req that the tap reads."""

    rid: str
    origin_input_ids: list[int]
    sampling_params: Params = field(default_factory=Params)
    output_ids_through_stop: list[int] = field(default_factory=list)
    finished_reason: object = None
    multimodal_inputs: object = None
    input_embeds: object = None
    lora_id: str | None = None

    def get_fill_ids(self) -> list[int]:
        return self.origin_input_ids

    def finished(self) -> bool:
        return self.finished_reason is not None


class ChoosySender(RecordingSender):
    """Wants no request whose id starts with ``no``."""

    def wants(self, request: str) -> bool:
        return not request.startswith("no")


class Setting:
    """A tap, and the records that come out of it."""

    def __init__(self, top_k: int | None = TOP_K, opt_in: bool = False) -> None:
        self._sender = ChoosySender()
        self.collector = FeedbackCollector(self._sender, LINEAGE)
        self.tap = FeedbackTap(self.collector, top_k, torch.device("cpu"), opt_in)
        self.states: list[Tensor] = []  # of each step

    def prefill(self, *reqs: Request, cached: int = 0, version: int = 0) -> Tensor:
        lengths = [len(req.origin_input_ids) - cached for req in reqs]
        taps = torch.randn(sum(lengths) + 2, TAPS)  # two rows of padding
        self.tap.after_prefill(reqs, [cached] * len(reqs), lengths, taps, version)
        return taps

    def step(
        self,
        *reqs: Request,
        accepted: list[int],
        version: int = 0,
        lengths: list[int] | None = None,
    ) -> tuple[Tensor, ...]:
        batch = len(reqs)
        rows = ChainRows.uniform(batch, WIDTH, torch.device("cpu"))
        if lengths is not None:
            rows = ChainRows.ragged(torch.tensor(lengths), sum(lengths), WIDTH)
        tokens = torch.randint(0, VOCAB, (batch, WIDTH))
        logits = torch.randn(rows.total, VOCAB)
        taps = torch.randn(rows.total, TAPS)
        self.states.append(torch.randn(rows.total, HIDDEN))
        self.tap.before_constraints(reqs, logits, rows, self.states[-1])
        seen = logits.clone()
        logits.fill_(float("-inf"))  # penalties and masks come after
        lens = torch.tensor([len(req.origin_input_ids) for req in reqs])
        verdict = Verdict(
            torch.zeros(batch, WIDTH, dtype=torch.int64),
            torch.tensor(accepted, dtype=torch.int32) + 1,
            torch.arange(batch) + 30,
        )
        self.tap.after_verify(reqs, lens, tokens, rows, taps, verdict, version)
        lens.add_(100)  # the scheduler goes on
        return tokens, seen, taps

    def records(self) -> list:
        self.collector.close()
        return self._sender.records


@pytest.fixture
def setting() -> Iterator[Setting]:
    torch.manual_seed(0)
    running = Setting()
    yield running
    running.collector.close()


def request(name: str, length: int = 4, **fields: object) -> Request:
    return Request(name, list(range(10, 10 + length)), **fields)


def test_a_request_is_followed_from_prefill_to_end(setting: Setting) -> None:
    req = request("a")
    prefill_taps = setting.prefill(req, cached=1, version=3)
    tokens, logits, taps = setting.step(req, accepted=[1], version=4)
    req.finished_reason, req.output_ids_through_stop = object(), [7, 8, 9]
    setting.tap.after_finish("a")
    context, block, end = setting.records()
    assert isinstance(context, ContextRecord)
    assert (context.start, context.version, context.token_ids.tolist()) == (1, 3, [10, 11, 12, 13])
    assert torch.equal(context.taps, prefill_taps[:3])
    assert isinstance(block, BlockRecord)
    assert (block.start, block.version, block.temperature) == (4, 4, 0.0)
    assert (block.verify_lengths, block.accepted) == ((WIDTH,), (1,))
    assert block.token_ids.tolist() == [*tokens[0, :2].tolist(), 30]
    assert block.drafts.tolist() == tokens[0, 1:].tolist()
    assert torch.equal(block.taps, taps[:2])
    assert isinstance(block.teacher, TopKTeacher)
    top = logits[:2].topk(TOP_K)
    assert torch.equal(block.teacher.logits, top.values)
    assert torch.equal(block.teacher.token_ids.long(), top.indices)
    torch.testing.assert_close(block.teacher.logsumexp, logits[:2].logsumexp(-1))
    assert end == EndRecord(LINEAGE, "a", 2, 7, "finished")


def test_rows_of_other_requests_are_left_out(setting: Setting) -> None:
    reqs = [request("no-1", 3), request("a", 5), request("no-2", 2), request("b", 4)]
    prefill_taps = setting.prefill(*reqs)
    _, _, taps = setting.step(*reqs, accepted=[0, 2, 0, 1])
    _, _, later = setting.step(*reqs[:2], accepted=[0, 0])  # another batch, another index
    for req in reqs:
        req.finished_reason = object()
        setting.tap.after_finish(req.rid)
    records = setting.records()
    assert {record.request for record in records} == {"a", "b"}
    contexts = {r.request: r.taps for r in records if isinstance(r, ContextRecord)}
    assert torch.equal(contexts["a"], prefill_taps[3:8])
    assert torch.equal(contexts["b"], prefill_taps[10:14])
    blocks = [r for r in records if isinstance(r, BlockRecord)]
    of_a = torch.cat([r.taps for r in blocks if r.request == "a"])
    assert torch.equal(of_a, torch.cat([taps[WIDTH : 2 * WIDTH], later[WIDTH : WIDTH + 1]]))
    of_b = torch.cat([r.taps for r in blocks if r.request == "b"])
    assert torch.equal(of_b, taps[3 * WIDTH : 3 * WIDTH + 2])


def test_the_last_hidden_state_can_be_the_teacher() -> None:
    setting = Setting(top_k=None)
    reqs = [request("no-1", 3), request("a", 5), request("no-2", 2), request("b", 4)]
    setting.prefill(*reqs)
    setting.step(*reqs, accepted=[0, 2, 0, 1])
    setting.step(reqs[1], reqs[3], accepted=[1, 0])  # all of the batch
    for req in reqs:
        req.finished_reason = object()
        setting.tap.after_finish(req.rid)
    first, second = (states.view(-1, WIDTH, HIDDEN) for states in setting.states)
    blocks = [r for r in setting.records() if isinstance(r, BlockRecord)]
    assert all(isinstance(block.teacher, HiddenTeacher) for block in blocks)
    of_a = torch.cat([block.teacher.states for block in blocks if block.request == "a"])
    assert torch.equal(of_a, torch.cat([first[1, :3], second[0, :2]]))
    of_b = torch.cat([block.teacher.states for block in blocks if block.request == "b"])
    assert torch.equal(of_b, torch.cat([first[3, :2], second[1, :1]]))


@pytest.mark.parametrize(
    "fields", [{"multimodal_inputs": object()}, {"input_embeds": [[0.0]]}, {"lora_id": "adapter"}]
)
def test_what_a_drafter_cannot_learn_from_is_left_out(
    setting: Setting, fields: dict[str, object]
) -> None:
    req = request("a", **fields)
    setting.prefill(req)
    setting.step(req, accepted=[1])
    assert setting.records() == []


@pytest.mark.parametrize(
    ("custom", "opt_out", "opt_in"),
    [
        (None, True, False),
        ({}, True, False),
        ({"thinking_budget": 3}, True, False),
        ("not a dictionary", True, False),
        ({CONSENT: True}, True, True),
        ({CONSENT: False}, False, False),
        ({CONSENT: None}, False, False),
        ({CONSENT: "true"}, False, False),
        ({CONSENT: 1}, False, False),
    ],
)
def test_a_request_says_whether_it_may_be_learned_from(
    custom: object, opt_out: bool, opt_in: bool
) -> None:
    for wanted, setting in ((opt_out, Setting()), (opt_in, Setting(opt_in=True))):
        req = request("a", sampling_params=Params(custom_params=custom))
        setting.prefill(req)
        setting.step(req, accepted=[1])
        assert bool(setting.records()) == wanted


def test_health_checks_are_left_out(setting: Setting) -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    setting.prefill(request(f"{HEALTH_CHECK_RID_PREFIX}_1"))
    assert setting.records() == []


def test_an_abort_is_told_apart(setting: Setting) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req = request("a", finished_reason=FINISH_ABORT("gone"))
    setting.prefill(req)
    setting.tap.after_finish("a")
    assert setting.records()[-1].outcome == "aborted"


def test_a_request_that_ends_with_its_prefill_is_closed_by_the_next(setting: Setting) -> None:
    req = request("a")
    setting.prefill(req)
    req.finished_reason, req.output_ids_through_stop = object(), [7]
    setting.prefill(request("b"))
    ends = [r for r in setting.records() if isinstance(r, EndRecord)]
    assert [(r.request, r.length) for r in ends] == [("a", 5)]


def test_the_temperature_is_the_requests(setting: Setting) -> None:
    req = request("a", sampling_params=Params(temperature=0.7, top_k=1 << 30))
    setting.prefill(req)
    setting.step(req, accepted=[0])
    req.finished_reason = object()
    setting.tap.after_finish("a")
    assert setting.records()[1].temperature == pytest.approx(0.7)
