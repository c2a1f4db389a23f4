import numpy as np
import pytest

from online.hedge import Hedge


def test_without_a_share_weights_are_exponential_in_the_cumulative_losses() -> None:
    losses = np.random.default_rng(0).random((40, 3))
    hedge = Hedge(3, rate=0.7, share=0.0)
    for row in losses:
        hedge.observe(row)
    expected = np.exp(-0.7 * losses.sum(0))
    np.testing.assert_allclose(hedge.weights, expected / expected.sum(), rtol=1e-9)


def test_the_share_lets_an_expert_come_back_quickly() -> None:
    shared, plain = Hedge(2, 1.0, 0.02), Hedge(2, 1.0, 0.0)
    for hedge in (shared, plain):
        for _ in range(200):
            hedge.observe(np.array([0.2, 0.8]))
        for _ in range(12):
            hedge.observe(np.array([0.8, 0.2]))
    assert shared.weights[1] > 0.9
    assert plain.weights[1] < 1e-6


def test_the_least_weight_is_the_share() -> None:
    hedge = Hedge(4, 50.0, 0.04)
    for _ in range(1000):
        hedge.observe(np.array([0.0, 1.0, 1.0, 1.0]))
    assert hedge.weights.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(hedge.weights[1:], 0.01)
    hedge.reset()
    np.testing.assert_allclose(hedge.weights, 0.25)


def test_regret_stays_below_the_bound() -> None:
    """Mixture loss against the best expert: ``log(K) / rate + rounds * rate / 8``."""
    rng = np.random.default_rng(1)
    hedge, rate, rounds = Hedge(5, 0.2, 0.0), 0.2, 300
    means = np.array([0.5, 0.45, 0.6, 0.55, 0.4])
    mixture, total = 0.0, np.zeros(5)
    for _ in range(rounds):
        losses = (rng.random(5) < means).astype(float)
        mixture += float(hedge.weights @ losses)
        total += losses
        hedge.observe(losses)
    assert mixture - total.min() <= np.log(5) / rate + rounds * rate / 8


def test_a_divided_weight_goes_to_the_heirs() -> None:
    hedge = Hedge(4, 1.0, 0.0)
    hedge.weights = np.array([0.1, 0.6, 0.2, 0.1])
    hedge.divide(1, [2, 3])
    assert hedge.weights.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(hedge.weights[1:], hedge.weights[1])
    np.testing.assert_allclose(hedge.weights[0], 0.1 / 0.7)
