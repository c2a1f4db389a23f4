"""The tap on a GPU: the values that CUDA graphs held, although they are overwritten at once."""

import pytest
import torch
from torch import Tensor

from adaspec.chains import ChainRows
from adaspec.feedback import (
    BlockRecord,
    ContextRecord,
    FeedbackCollector,
    HiddenTeacher,
    TopKTeacher,
)
from adaspec.feedback.captures import Capture
from sglang_patches.online.tap import FeedbackTap
from sglang_patches.worker.accept import Verdict
from tests.gpu.watched_server import noted_waits
from tests.online.world import LINEAGE
from tests.sglang_patches.online.test_tap import ChoosySender, Request, request

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
VOCAB, WIDTH, TAPS, HIDDEN, TOP_K = 4096, 4, 192, 64, 8
STEPS = 12
CYCLES = 2_000_000  # about a millisecond of the GPU


class Target:
    """A CUDA graph whose outputs are the same memory in every step."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self._scale = torch.ones((), device=DEVICE)
        widths = {"logits": VOCAB, "taps": TAPS, "states": HIDDEN}
        sources = {name: torch.randn(batch * WIDTH, w, device=DEVICE) for name, w in widths.items()}
        outputs = {name: torch.empty_like(source) for name, source in sources.items()}
        self.logits, self.taps, self.states = outputs.values()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for name, output in outputs.items():
                torch.mul(sources[name], self._scale, out=output)

    def run(self, step: int) -> None:
        self._scale.fill_(step)
        self._graph.replay()


class LateSink:
    """Looks at captures when all is over, as late as a slow relay."""

    def __init__(self, sender: ChoosySender) -> None:
        self._collector = FeedbackCollector(sender, LINEAGE, steps_per_record=1)
        self._captures: list[Capture] = []
        self.wants = sender.wants

    def submit(self, capture: Capture) -> None:
        self._captures.append(capture)

    def collect(self) -> None:
        for capture in self._captures:
            self._collector.submit(capture)


@pytest.fixture
def sender() -> ChoosySender:
    return ChoosySender()


@pytest.fixture
def sink(sender: ChoosySender) -> LateSink:
    return LateSink(sender)


@pytest.mark.parametrize("top_k", [TOP_K, None], ids=["top-k", "hidden"])
@pytest.mark.parametrize("names", [["a", "b"], ["no-1", "a", "no-2", "b"]], ids=["all", "some"])
def test_what_is_captured_is_what_the_device_held(
    sink: LateSink, sender: ChoosySender, names: list[str], top_k: int | None
) -> None:
    reqs = [request(name, length=3 + i) for i, name in enumerate(names)]
    tap = FeedbackTap(sink, top_k, DEVICE)
    target = Target(len(reqs))
    rows = ChainRows.uniform(len(reqs), WIDTH, DEVICE)
    lens = torch.tensor([len(req.origin_input_ids) for req in reqs], device=DEVICE)
    accepted = torch.arange(len(reqs), device=DEVICE, dtype=torch.int32) % WIDTH
    expected: list[dict[str, Tensor]] = []
    prompt_taps = torch.randn(sum(len(req.origin_input_ids) for req in reqs), TAPS, device=DEVICE)
    prompt_seen = prompt_taps.clone()

    with noted_waits() as waits:
        lengths = [len(req.origin_input_ids) for req in reqs]
        tap.after_prefill(reqs, [0] * len(reqs), lengths, prompt_taps, 0)
        prompt_taps.fill_(-1)
        for step in range(1, STEPS + 1):
            target.run(step)
            tokens = torch.randint(0, VOCAB, (len(reqs), WIDTH), device=DEVICE)
            expected.append(
                {
                    "logits": target.logits.clone(),
                    "taps": target.taps.clone(),
                    "states": target.states.clone(),
                    "tokens": tokens.clone(),
                    "anchors": lens.clone(),
                }
            )
            with torch.cuda.stream(tap._copier._stream):
                torch.cuda._sleep(CYCLES)  # the copies come late
            tap.before_constraints(reqs, target.logits, rows, target.states)
            verdict = Verdict(tokens, accepted + 1, tokens[:, -1] + 0)
            tap.after_verify(reqs, lens, tokens, rows, target.taps, verdict, step)
            target.run(-step)
            lens += accepted + 1
            del tokens, verdict
    assert not waits, waits[0]

    sink.collect()
    records = sender.records
    assert {record.request for record in records} == {"a", "b"}
    for name in ("a", "b"):
        row = names.index(name)
        check(records, reqs[row], row, expected, int(accepted[row]), prompt_seen, lengths)


def check(
    records: list,
    req: Request,
    row: int,
    expected: list[dict[str, Tensor]],
    accepted: int,
    prompt_taps: Tensor,
    lengths: list[int],
) -> None:
    mine = [record for record in records if record.request == req.rid]
    context, *blocks = mine
    assert isinstance(context, ContextRecord)
    start = sum(lengths[:row])
    assert torch.equal(context.taps, prompt_taps[start : start + lengths[row]].cpu())
    assert len(blocks) == STEPS
    for block, held in zip(blocks, expected, strict=True):
        assert isinstance(block, BlockRecord)
        rows = slice(row * WIDTH, row * WIDTH + accepted + 1)
        assert block.start == int(held["anchors"][row])
        assert block.accepted == (accepted,)
        assert block.drafts.tolist() == held["tokens"][row, 1:].tolist()
        assert torch.equal(block.taps, held["taps"][rows].cpu())
        if isinstance(block.teacher, HiddenTeacher):
            assert torch.equal(block.teacher.states, held["states"][rows].cpu())
            continue
        assert isinstance(block.teacher, TopKTeacher)
        top = held["logits"][rows].topk(TOP_K)
        assert torch.equal(block.teacher.logits, top.values.cpu())
        assert torch.equal(block.teacher.token_ids.long(), top.indices.cpu())
        torch.testing.assert_close(
            block.teacher.logsumexp, held["logits"][rows].logsumexp(-1).cpu()
        )
