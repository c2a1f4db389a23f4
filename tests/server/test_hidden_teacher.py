"""The last hidden states that leave a live server give the target's own logits, row by row."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from adaspec.feedback import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    FeedbackReceiver,
    HiddenTeacher,
    Record,
    in_share,
    open_channel,
)
from adaspec.versions import lineage_of
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.launch import Server, serve
from tests.server.reference import ReferenceModel

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(4)]
SHARE = 0.5
CONSTRAINTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0, "regex": "[a-z]{30}"},
    {"temperature": 0, "logit_bias": {"7": 30.0}},
    {"temperature": 0.9},
]


@pytest.fixture
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a path short enough for sockets."""
    return tmp_path_factory.mktemp("c") / "channel"


@pytest.fixture
def drafter(tiny_target: Path, tmp_path: Path) -> Path:
    return write_fitted_drafter(tmp_path / "drafter", tiny_target, PROMPTS)


@pytest.fixture
def server(tiny_target: Path, drafter: Path, channel: Path, tmp_path: Path) -> Iterator[Server]:
    config = tmp_path / "adaspec.toml"
    config.write_text(
        f'[tap]\nenabled = true\nteacher = "hidden"\nteacher_rows = "verified"\nshare = {SHARE}\n'
        f'refresh_share = 1.0\n[channel]\ndirectory = "{channel}"\n'
    )
    arguments = ("--speculative-algorithm", "ADASPEC", "--dtype", "float32")
    arguments += ("--speculative-draft-model-path", str(drafter), "--skip-server-warmup")
    with serve(tiny_target, *arguments, log_path=tmp_path / "server.log", config=config) as running:
        yield running


def receive(receiver: FeedbackReceiver, ends: int) -> list[Record]:
    """Records until so many requests have ended."""
    records: list[Record] = []
    while sum(isinstance(record, EndRecord) for record in records) < ends:
        record = receiver.receive(timeout=30.0)
        assert record is not None, "no feedback came"
        records.append(record)
    return records


def test_states_times_the_lm_head_are_the_targets_logits(
    server: Server, drafter: Path, channel: Path, tiny_target: Path
) -> None:
    reference = ReferenceModel(tiny_target)
    lm_head = reference.model.lm_head.weight.detach()
    receiver = FeedbackReceiver(open_channel(channel).feedback, lineage_of(drafter))
    requests = {
        f"request-{i}-{j}": {"input_ids": prompt, "sampling_params": {"max_new_tokens": 24, **how}}
        for i, prompt in enumerate(PROMPTS)
        for j, how in enumerate(CONSTRAINTS)
    }
    sampled = {rid for rid in requests if in_share(rid, SHARE, "feedback")}
    assert {int(rid[-1]) for rid in sampled} == set(range(len(CONSTRAINTS)))  # of every kind
    assert len(sampled) < len(requests)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.generate, rid=rid, **body) for rid, body in requests.items()]
        records = receive(receiver, ends=len(sampled))
        for answer in answers:
            answer.result()
    receiver.close()

    assert {record.request for record in records} == sampled
    tokens: dict[str, list[int]] = {}
    rows = accepted_drafts = 0
    for record in records:
        if isinstance(record, ContextRecord):
            tokens[record.request] = record.token_ids.tolist()
        if not isinstance(record, BlockRecord):
            continue
        assert isinstance(record.teacher, HiddenTeacher)
        known = tokens[record.request][: record.start] + record.token_ids.tolist()
        tokens[record.request] = known
        states = record.teacher.states.split(record.verify_lengths)
        for (anchor, length, accepted, drafts), found in zip(record.steps(), states, strict=True):
            chain = torch.tensor([known[: anchor + 1] + drafts.tolist()])
            with torch.no_grad():
                expected = reference.model(chain).logits[0, -length:]  # [length, vocab]
            torch.testing.assert_close(found @ lm_head.T, expected, rtol=1e-5, atol=1e-4)
            rows, accepted_drafts = rows + length, accepted_drafts + accepted
    assert rows > 100
    assert accepted_drafts > 0
