"""The cost table: learned, filled in between, robust, followed, never falling."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaspec.verify import CostModel, CostSample
from tests.verify.world import cpu_time, gpu_time, saturated_time

BLOCK = 16
TIMES = [cpu_time, gpu_time, saturated_time]


def probed(step_time=gpu_time, noise: float = 0.03, seed: int = 0) -> CostModel:
    """A model that has seen what a start-up probe measures."""
    random = np.random.default_rng(seed)
    model = CostModel(BLOCK, 128)
    model.seed(
        CostSample(b, b * w, 0, w > 1, step_time(b, b * w, 0, w > 1) * np.exp(noise * z))
        for b in (1, 4, 16, 64, 128)
        for w in (1, 2, 4, 8, 16)
        for z in random.standard_normal(3)
    )
    return model


def predicted(model: CostModel, batch: int, tokens: int, context: int = 0) -> float:
    return float(model.curve(batch, np.array([tokens])).seconds(context)[0])


def feed(model: CostModel, sample: CostSample, times: int, noise: float = 0.03) -> None:
    random = np.random.default_rng(1)
    for z in random.standard_normal(times):
        seconds = sample.seconds * float(np.exp(noise * z))
        model.observe(
            CostSample(sample.batch, sample.tokens, sample.context_tokens, sample.drafted, seconds)
        )
        model.learn()


@pytest.mark.parametrize("step_time", TIMES)
def test_it_fills_in_what_the_probe_left_out(step_time) -> None:
    model = probed(step_time)
    for batch in (1, 2, 3, 8, 24, 32, 96, 128):
        truth = step_time(batch, batch, 0, False)
        assert model.plain_seconds(batch, 0) == pytest.approx(truth, rel=0.12)
        for width in (2, 3, 6, 11, 16):
            truth = step_time(batch, batch * width, 0, True)
            assert predicted(model, batch, batch * width) == pytest.approx(truth, rel=0.3)


@pytest.mark.parametrize("step_time", TIMES)
def test_it_knows_precisely_what_it_sees_often(step_time) -> None:
    model = probed(step_time)
    truth = step_time(48, 48 * 5, 0, True)
    feed(model, CostSample(48, 48 * 5, 0, True, truth), 64)
    assert predicted(model, 48, 48 * 5) == pytest.approx(truth, rel=0.02)


def test_it_starts_without_a_probe() -> None:
    model = CostModel(BLOCK, 128)
    assert model.samples(drafted=True) == model.samples(drafted=False) == 0
    feed(model, CostSample(8, 64, 0, True, 0.02), 16)
    assert model.samples(drafted=True) == 16
    assert predicted(model, 8, 64) == pytest.approx(0.02, rel=0.05)


def test_uncertainty_grows_with_the_distance_from_what_was_seen() -> None:
    model = CostModel(BLOCK, 128)
    feed(model, CostSample(8, 64, 0, True, 0.02), 64)
    here, near, far = (model.doubt(b, np.array([8 * b]), True)[0] for b in (8, 16, 128))
    assert here < 0.03
    assert here < near < far
    assert model.doubt(8, np.array([8]), False)[0] > 0.2


def test_one_stall_moves_nothing() -> None:
    model = probed()
    usual = CostSample(16, 64, 0, True, gpu_time(16, 64, 0, True))
    feed(model, usual, 60)
    tokens = np.array([32, 64, 128, 256])
    before = model.curve(16, tokens).base, model.plain_seconds(16, 0)
    model.observe(CostSample(16, 64, 0, True, 100 * usual.seconds))
    feed(model, usual, 15)
    np.testing.assert_allclose(model.curve(16, tokens).base, before[0], rtol=0.03)
    assert model.plain_seconds(16, 0) == pytest.approx(before[1], rel=0.03)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_machine_that_changes_speed_is_followed_in_32_steps(factor: float) -> None:
    model = probed()
    feed(model, CostSample(16, 64, 0, True, gpu_time(16, 64, 0, True)), 64)
    feed(model, CostSample(16, 64, 0, True, factor * gpu_time(16, 64, 0, True)), 32)
    assert predicted(model, 16, 64) == pytest.approx(factor * gpu_time(16, 64, 0, True), rel=0.05)
    # What was not seen since follows too.
    assert predicted(model, 16, 256) == pytest.approx(factor * gpu_time(16, 256, 0, True), rel=0.2)
    truth = factor * gpu_time(64, 64, 0, False)
    assert model.plain_seconds(64, 0) == pytest.approx(truth, rel=0.2)


def test_what_is_noted_is_taken_in_later_the_newest_of_it() -> None:
    model = probed()
    truth = gpu_time(16, 64, 0, True)
    before = predicted(model, 16, 64)
    for seconds in (*[5 * truth] * 40, *[2 * truth] * 32):
        model.observe(CostSample(16, 64, 0, True, seconds))
    assert predicted(model, 16, 64) == before
    model.learn()
    assert predicted(model, 16, 64) == pytest.approx(2 * truth, rel=0.05)


def test_context_is_learned() -> None:
    def truth(context: int, tokens: int, drafted: bool) -> float:
        return 0.006 + 5e-8 * context + (1e-3 if drafted else 0) + 1e-5 * tokens

    model, random = CostModel(BLOCK, 128), np.random.default_rng(0)
    for _ in range(600):
        context, width = int(random.integers(0, 200_000)), int(random.choice([1, 4, 8]))
        seconds = truth(context, 32 * width, width > 1) * np.exp(0.03 * random.standard_normal())
        model.observe(CostSample(32, 32 * width, context, width > 1, float(seconds)))
        model.learn()
    for context in (5_000, 100_000, 190_000):
        assert predicted(model, 32, 128, context) == pytest.approx(
            truth(context, 128, True), rel=0.06
        )
        assert model.plain_seconds(32, context) == pytest.approx(
            truth(context, 32, False), rel=0.06
        )


@given(
    st.lists(
        st.tuples(
            st.integers(1, 128), st.integers(1, BLOCK), st.integers(0, 10**6), st.floats(1e-6, 1e3)
        ),
        max_size=40,
    ),
    st.integers(1, 128),
    st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_time_never_falls_with_more_tokens_short_of_the_whole_block_whatever_was_measured(
    samples: list[tuple[int, int, int, float]], batch: int, context: int
) -> None:
    model = CostModel(BLOCK, 128)
    model.seed(CostSample(b, b * w, c, w > 1, s) for b, w, c, s in samples)
    seconds = model.curve(batch, np.arange(batch, batch * BLOCK + 1)).seconds(context)
    assert np.isfinite(seconds).all()
    # Between the last two widths the whole block, which may be faster, has a share.
    parts = seconds[: batch * (model.grid.widths[-2] - 1) + 1]
    assert (np.diff(parts) >= -1e-12 * parts[1:]).all()
    assert (seconds > 0).all() if samples else True
    assert np.isfinite(model.plain_seconds(batch, context))


def test_the_whole_block_can_be_the_fastest_of_long_steps() -> None:
    """Its chains are equally long, so that nothing has to be shared out or padded."""
    model = CostModel(BLOCK, 128)
    for _ in range(40):
        for tokens, seconds in ((4, 7.4e-3), (8, 8.2e-3), (BLOCK, 7.3e-3)):
            model.observe(CostSample(8, 8 * tokens, 1000, True, seconds))
        model.learn()
    half, whole = model.curve(8, np.array([64.0, 8.0 * BLOCK])).seconds(1000)
    assert whole == pytest.approx(7.3e-3, rel=0.03)
    assert half == pytest.approx(8.2e-3, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_durations_are_ignored(seconds: float) -> None:
    model = CostModel(BLOCK, 8)
    model.seed([CostSample(1, 8, 0, True, seconds)] * 8)
    assert model.samples(drafted=True) == 0


def test_the_table_says_what_it_knows() -> None:
    table = probed().table()
    assert table.samples == (15, 60)
    row, column = table.batches.index(16), table.widths.index(8)
    assert table.drafted[row, column] == pytest.approx(gpu_time(16, 128, 0, True), rel=0.1)
    assert table.plain[row] == pytest.approx(gpu_time(16, 16, 0, False), rel=0.1)
    assert table.drafted_error.shape == table.drafted.shape
    assert (table.plain_error > 0).all()
