"""Two ranks decide alike, whatever each of them has ready."""

import multiprocessing
from pathlib import Path

import pytest
import torch.distributed as dist

from sglang_patches.online.agreement import ROUND_STEPS, Agreement, Decision

Wish = tuple[int | None, bool]


def _rank(rank: int, file: Path, wishes: list[Wish], results: "multiprocessing.Queue") -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    agreement = Agreement(dist.group.WORLD)
    results.put((rank, agreement.decide(*wishes[rank])))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("wishes", "decision"),
    [
        ([(3, False), (3, False)], Decision(3)),
        ([(3, False), (4, False)], Decision()),
        ([(3, False), (None, False)], Decision()),
        ([(None, False), (None, False)], Decision()),
        ([(3, True), (3, False)], Decision(roll_back=True)),
        ([(None, True), (4, False)], Decision(roll_back=True)),
    ],
)
def test_ranks_agree(tmp_path: Path, wishes: list[Wish], decision: Decision) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, tmp_path / "store", wishes, results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    answers = [results.get(timeout=30) for _ in ranks]
    for process in ranks:
        process.join(10)
    assert [answer for _, answer in answers] == [decision, decision]


def test_a_single_rank_has_its_way_at_every_step() -> None:
    agreement = Agreement(None)
    assert [agreement.is_due() for _ in range(ROUND_STEPS)] == [True] * ROUND_STEPS
    assert agreement.decide(7, False) == Decision(7)
    assert agreement.decide(7, True) == Decision(roll_back=True)
