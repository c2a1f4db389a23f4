"""The served drafter and the one that is trained compute the same logits from the same context.

The served side is a real server: taps captured by the target's passes, context K/V written by
prefill chunks, commits and prefix hits, attention over the paged pool. The other side is
`adaspec.drafters.BlockDrafter` on the hidden states of the target in transformers.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from adaspec.drafters.checkpoint import load_drafter
from adaspec.drafters.network import BlockDrafter
from adaspec.load.launch import ServerSpec, free_port, start_server
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.recording_server import RECORDS_VARIABLE, DraftPass, read_passes
from tests.server.reference import ReferenceModel
from tests.server.tiny_models import TAPS

pytestmark = pytest.mark.server

RECORDER = "tests.server.recording_server"
TOLERANCE = 1e-5  # of the largest logit of a block, in float32
LENGTH = 20
SHORT = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(4)]
LONG = [3 + (i * 7) % 200 for i in range(150)]  # more than two prefill chunks
PROMPTS = {
    **{f"short-{i}": prompt for i, prompt in enumerate(SHORT)},
    "long": LONG,
    "long-again": [*LONG, 9, 8],  # starts with cached tokens
}


class Block(NamedTuple):
    """One served draft block of one request.

    ``sequence`` holds the prompt and all output; the block follows its first ``prefix`` tokens.
    """

    sequence: list[int]
    prefix: int
    served: torch.Tensor  # logits [block, vocab]
    drafted: list[int]


class Recording(NamedTuple):
    blocks: list[Block]
    passes: list[DraftPass]
    target: ReferenceModel
    drafter: BlockDrafter


@pytest.fixture(scope="module")
def recording(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    directory = tmp_path_factory.mktemp("equality")
    drafter = write_fitted_drafter(directory / "drafter", tiny_target, SHORT)
    records = directory / "records"
    records.mkdir()
    spec = ServerSpec(
        target=str(tiny_target),
        port=free_port(),
        drafter=str(drafter),
        dtype="float32",
        extra=("--chunked-prefill-size", "64", "--skip-server-warmup"),
        environment={RECORDS_VARIABLE: str(records)},
    )
    log = directory / "server.log"
    with start_server(spec, log=log, command=command(spec, RECORDER)) as process:
        process.wait_until_healthy(300)
        server = Server(process.url, log)
        with ThreadPoolExecutor(len(SHORT)) as pool:
            answers = dict(pool.map(lambda rid: (rid, generate(server, rid)), list(PROMPTS)[:4]))
        for rid in ("long", "long-again"):
            answers[rid] = generate(server, rid)
    assert answers["long-again"]["meta_info"]["cached_tokens"] >= len(LONG)
    sequences = {rid: PROMPTS[rid] + answers[rid]["output_ids"] for rid in PROMPTS}
    target = ReferenceModel(tiny_target)
    passes = read_passes(records)
    return Recording(to_blocks(passes, sequences, target), passes, target, load_drafter(drafter))


def generate(server: Server, rid: str) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    return server.generate(rid=rid, input_ids=PROMPTS[rid], sampling_params=sampling)


def to_blocks(
    passes: list[DraftPass], sequences: dict[str, list[int]], target: ReferenceModel
) -> list[Block]:
    lm_head = target.model.lm_head.weight.detach()
    blocks = []
    for step in passes:
        for row, rid in enumerate(step.request):
            prefix = int(step.positions[row, 0])
            # Overlap scheduling runs one step past the end; the health probe has another id.
            if rid in sequences and prefix < len(sequences[rid]):
                assert int(step.ids[row, 0]) == sequences[rid][prefix]
                served = F.linear(step.hidden[row], lm_head)
                blocks.append(Block(sequences[rid], prefix, served, step.drafted[row].tolist()))
    return blocks


@torch.inference_mode()
def trained(recording: Recording, block: Block, change: Callable | None = None) -> torch.Tensor:
    """Logits ``[block, vocab]`` of the PyTorch drafter; ``change`` spoils its input."""
    ids = torch.tensor([block.sequence[: block.prefix]])
    states = recording.target.model(ids, output_hidden_states=True).hidden_states
    taps = torch.stack([states[layer + 1][0] for layer in TAPS])  # [taps, prefix, hidden]
    if change is not None:
        taps = change(taps)
    return recording.drafter.draft(
        taps.transpose(0, 1).flatten(1),
        block.sequence[block.prefix],
        recording.target.model.get_input_embeddings().weight,
        recording.target.model.lm_head.weight,
    )


def difference(served: torch.Tensor, expected: torch.Tensor) -> float:
    return float((served - expected).abs().max() / expected.abs().max())


def test_logits_are_equal_in_every_block(recording: Recording) -> None:
    worst = max(difference(b.served, trained(recording, b)) for b in recording.blocks)
    assert worst < TOLERANCE


def test_proposals_are_the_argmax_of_the_logits(recording: Recording) -> None:
    for block in recording.blocks:
        assert block.drafted == trained(recording, block)[1:].argmax(-1).tolist()


def test_the_comparison_covers_batches_commits_chunks_and_prefix_hits(
    recording: Recording,
) -> None:
    batch_sizes = {len(step.request) for step in recording.passes}
    assert min(batch_sizes) == 1 < max(batch_sizes)
    prefixes = [b.prefix for b in recording.blocks if b.sequence[:5] == SHORT[0]]
    assert prefixes[0] == len(SHORT[0])
    assert max(b - a for a, b in pairwise(prefixes)) > 1
    assert {len(PROMPTS["long"]), len(PROMPTS["long-again"])} <= {
        b.prefix for b in recording.blocks
    }


MISTAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # What a worker could get wrong, done to the other side. [taps, prefix, hidden] each.
    "block one position late": lambda taps: F.pad(taps, (0, 0, 0, 1)),
    "context one position early": lambda taps: taps.roll(-1, dims=1),
    "last commit lost": lambda taps: F.pad(taps[:, :-1], (0, 0, 1, 0)),
    "taps swapped": lambda taps: taps.flip(0),
    "taps of one layer": lambda taps: taps[:1].expand_as(taps),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_the_comparison_would_notice(recording: Recording, mistake: str) -> None:
    for block in recording.blocks[::5]:
        wrong = trained(recording, block, MISTAKES[mistake])
        assert difference(block.served, wrong) > 100 * TOLERANCE
