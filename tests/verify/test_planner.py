"""The choice of the total: the best one, with tiers, doubt and little exploration."""

import numpy as np
import pytest

from adaspec.verify import CostModel, CostSample, StepLoad, StepPlan, VerifyShapes
from adaspec.verify.exploration import Exploration
from adaspec.verify.forecast import AcceptanceCurve
from adaspec.verify.planner import GoodputPlanner

BLOCK = 8


def load(batch: int) -> StepLoad:
    return StepLoad(tuple(map(str, range(batch))), 0, np.zeros(batch, bool))


def planner(
    shapes: VerifyShapes, plain: float, base: float, per_token: float, share: float = 0.0
) -> GoodputPlanner:
    """With a table of steps that take ``base + per_token · padded tokens``."""
    cost = CostModel(shapes.block_size, shapes.max_batch)
    batches = [2**i for i in range(shapes.max_batch.bit_length())]
    cost.seed(
        CostSample(b, b * w, 0, w > 1, plain if w == 1 else base + per_token * b * w)
        for b in batches
        for w in range(1, BLOCK + 1)
        for _ in range(20)
    )
    return GoodputPlanner(shapes, cost, share)


def survival(batch: int, acceptance: float) -> np.ndarray:
    row = np.full(BLOCK - 1, acceptance, np.float32).cumprod(dtype=np.float32)
    return np.broadcast_to(row, (1, batch, BLOCK - 1))


def accepted(planner: GoodputPlanner, batch: int, acceptance: float) -> np.ndarray:
    rows, verified = survival(batch, acceptance), planner.drafts_verified(batch)
    return np.array([AcceptanceCurve.of(rows[..., :r], True).at(verified) for r in planner.reads])


def plan(planner: GoodputPlanner, batch: int, acceptance: float) -> StepPlan:
    return planner.plan(load(batch), accepted(planner, batch, acceptance), True)


UNIFORM = VerifyShapes(BLOCK, 16, ragged=False)
RAGGED = VerifyShapes(BLOCK, 16, ragged=True)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9, 0.98])
@pytest.mark.parametrize("shapes", [UNIFORM, RAGGED])
def test_the_best_total_is_chosen(shapes: VerifyShapes, acceptance: float) -> None:
    base, per_token = 0.010, 0.001
    chosen = plan(planner(shapes, 0.012, base, per_token), 4, acceptance)
    commits = 4 * (1 + np.concatenate([[0.0], np.cumsum(acceptance ** np.arange(1, BLOCK))]))
    rates = commits / (base + per_token * 4 * np.arange(1, BLOCK + 1))
    best = max(rates[1:].max(), 4 / 0.012)
    if not chosen.drafted:
        assert 0.97 * best <= 4 / 0.012
    else:
        reached = np.interp(chosen.tokens / 4, np.arange(1, BLOCK + 1), rates)
        assert reached >= 0.97 * best


def test_drafts_that_never_pay_are_not_made() -> None:
    chosen = plan(planner(UNIFORM, 0.010, 0.020, 0.0), 4, 0.2)
    assert not chosen.drafted
    assert chosen.tokens == 4
    assert plan(planner(UNIFORM, 0.010, 0.011, 0.0), 4, 0.9).width == BLOCK


def test_tokens_up_to_the_graph_tier_are_used() -> None:
    shapes = VerifyShapes(BLOCK, 16, ragged=True, token_tiers=(8, 16, 32, 64, 128))
    chosen = plan(planner(shapes, 0.020, 0.010, 0.001), 4, 0.7)
    assert chosen.drafted
    assert chosen.tokens in (8, 16, 32)


@pytest.mark.parametrize(("draft_cost", "least", "most"), [(0.01, 6, 7), (0.3, 2, 4), (3.0, 1, 3)])
def test_as_many_drafts_are_read_as_pay(draft_cost: float, least: int, most: int) -> None:
    shapes = VerifyShapes(BLOCK, 16, ragged=True, on_host=True, draft_cost=draft_cost)
    chooser = planner(shapes, 0.030, 0.010, 0.001)
    rows = np.array([0.99, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], np.float32).cumprod(dtype=np.float32)
    rows = np.stack([rows, np.full(7, 0.9, np.float32).cumprod(dtype=np.float32)] * 2)[None]
    verified = chooser.drafts_verified(4)
    accepted = np.array(
        [AcceptanceCurve.of(rows[..., :r], True).at(verified) for r in chooser.reads]
    )
    chosen = chooser.plan(load(4), accepted, True)
    assert chosen.drafted
    assert least <= chosen.drafts <= most
    assert chosen.tokens <= 4 * (1 + chosen.drafts)


def test_reading_more_than_is_verified_is_work_of_its_own() -> None:
    shapes = VerifyShapes(BLOCK, 16, ragged=True, draft_cost=0.25)
    assert shapes.work(4, 16, drafted=True, read=3) == 16
    assert shapes.work(4, 17, drafted=True, read=4) == 17 + 0.25 * 3
    assert shapes.work(4, 16, drafted=True, read=7) == 16 + 0.25 * 4 * 4
    assert shapes.work(4, 4, drafted=False, read=0) == 4


def test_without_data_the_block_is_verified_and_plain_steps_are_tried() -> None:
    cost = CostModel(BLOCK, 16)
    fresh = GoodputPlanner(UNIFORM, cost, 0.005)
    first = plan(fresh, 4, 0.9)
    assert (first.width, first.reason) == (BLOCK, "no cost data")
    cost.seed([CostSample(4, 32, 0, True, 0.02)])
    then = [plan(fresh, 4, 0.9) for _ in range(40)]
    plain = [p for p in then if p.reason == "no cost data"]
    assert plain
    assert not any(p.drafted for p in plain)
    assert len(plain) < 10
    assert any(p.drafted for p in then)


def test_unknown_acceptance_is_tried_even_if_plain_looks_better() -> None:
    fresh = planner(UNIFORM, 0.010, 0.020, 0.0)
    assert fresh.plan(load(4), accepted(fresh, 4, 0.1), False).drafted


def test_plain_decoding_is_left_only_for_a_gain() -> None:
    """At equal rates the kind of the step does not alternate."""
    steady = planner(UNIFORM, 0.010, 0.014, 0.0)
    kinds = {plan(steady, 4, 0.3 + 1e-4 * (i % 2)).drafted for i in range(20)}
    assert len(kinds) == 1


def test_refinement_verifies_good_blocks_longer_than_bad_ones() -> None:
    shapes = VerifyShapes(BLOCK, 16, ragged=True, on_host=True)
    steady = planner(shapes, 0.012, 0.010, 0.001)
    chosen = plan(steady, 4, 0.7)
    good, bad = (steady.refine(chosen, survival(4, a)[0]) for a in (0.95, 0.3))
    assert good > chosen.tokens > bad >= 4


def test_exploration_pays_for_itself() -> None:
    """Of 20,000 steps of which drafts cost twice a plain step, the share that is lost."""
    share, plain, drafted = 0.005, 0.010, 0.020
    explorer = planner(UNIFORM, plain, drafted, 0.0, share)
    plans = [plan(explorer, 4, 0.1) for _ in range(20_000)]
    tried = sum(p.drafted for p in plans)
    assert tried >= 40
    lost = tried * (drafted - plain * 1.12)
    grant = 512  # steps, at the start
    assert lost <= share * plain * (len(plans) + grant)


def test_exploration_restarts_after_a_change() -> None:
    explorer = Exploration(1.0)

    def steps_until_tried() -> int:
        for step in range(1, 2000):
            explorer.earn(1.0)
            if explorer.pay("draft", 0.01):
                while explorer.pay("draft", 0.01):  # the rest of the burst
                    pass
                return step
        raise AssertionError("never tried")

    waits = [steps_until_tried() for _ in range(8)]
    assert waits[0] < waits[3] < waits[6]
    assert waits[7] == waits[6]
    explorer.restart()
    assert steps_until_tried() <= waits[0]
