"""Update rules against their equations, in float64 and by hand."""

import pytest
import torch
from torch import Tensor, nn

from adaspec.errors import AdaSpecError
from online.config import OptimiserSection
from online.optimiser import Optimiser

TARGET = torch.tensor([3.0, -1.0, 0.5])


def parameters() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.zeros(3)), "head": nn.Parameter(torch.zeros(3))}


def gradient(weights: Tensor, step: int) -> Tensor:
    """Of a quadratic whose target moves."""
    return weights - TARGET * (1 + 0.1 * step)


def settings(**changes: object) -> OptimiserSection:
    defaults = {
        "learning_rate": 0.1,
        "warmup_steps": 0,
        "clip_norm": 1e9,
        "head_learning_rate": 0.1,
    }
    return OptimiserSection(**(defaults | changes))  # type: ignore[arg-type]


def played(config: OptimiserSection, steps: int) -> list[Tensor]:
    chosen = parameters()
    optimiser = Optimiser(chosen, frozenset({"head"}), config)
    made = []
    for step in range(steps):
        for parameter in chosen.values():
            parameter.grad = gradient(parameter.detach(), step)
        optimiser.clip()
        optimiser.step()
        assert torch.equal(chosen["w"], chosen["head"])
        made.append(chosen["w"].detach().clone())
    assert optimiser.steps == steps
    return made


def test_gradient_descent() -> None:
    weights = torch.zeros(3, dtype=torch.float64)
    for step, ours in enumerate(played(settings(rule="sgd"), 8)):
        weights = weights - 0.1 * gradient(weights, step)
        torch.testing.assert_close(ours.double(), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hint", ["last", "average"])
def test_the_optimistic_rule_plays_a_hint_ahead_of_its_auxiliary_iterate(hint: str) -> None:
    auxiliary = weights = torch.zeros(3, dtype=torch.float64)
    past: Tensor | None = None
    for step, ours in enumerate(played(settings(rule="sgd", hint=hint), 8)):
        slope = gradient(weights, step)
        past = slope if hint == "last" or past is None else 0.9 * past + 0.1 * slope
        auxiliary = auxiliary - 0.1 * slope
        weights = auxiliary - 0.1 * past
        torch.testing.assert_close(ours.double(), weights, rtol=1e-5, atol=1e-6)


def test_it_is_not_momentum() -> None:
    """After a gradient of zero the hint is gone, and the auxiliary iterate remains."""
    chosen = {"w": nn.Parameter(torch.zeros(1))}
    optimiser = Optimiser(chosen, frozenset(), settings(rule="sgd", hint="last"))
    for slope in (1.0, 0.0, 0.0):
        chosen["w"].grad = torch.tensor([slope])
        optimiser.step()
    assert float(chosen["w"].detach()) == pytest.approx(-0.1)


@pytest.mark.parametrize(("turn", "gains"), [(0.05, True), (3.0, False)])
def test_optimism_gains_where_consecutive_gradients_are_alike(turn: float, gains: bool) -> None:
    """Linear losses whose slope turns by an angle from step to step: what is lost in all."""
    lost = []
    for hint in ("none", "last"):
        chosen = {"w": nn.Parameter(torch.zeros(2))}
        optimiser = Optimiser(chosen, frozenset(), settings(rule="sgd", hint=hint))
        total = 0.0
        for step in range(60):
            angle = torch.tensor(turn * step)
            slope = torch.stack([angle.cos(), angle.sin()])
            total += float(slope @ chosen["w"])
            chosen["w"].grad = slope
            optimiser.step()
        lost.append(total)
    assert (lost[1] < lost[0]) == gains


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize("hint", ["none", "last", "average"])
def test_a_restart_goes_on_as_if_nothing_had_happened(rule: str, hint: str) -> None:
    config = settings(rule=rule, hint=hint)
    straight = played(config, 7)[-1]
    first = parameters()
    optimiser = Optimiser(first, frozenset({"head"}), config)
    for step in range(4):
        for parameter in first.values():
            parameter.grad = gradient(parameter.detach(), step)
        optimiser.step()
    saved = {name: tensor.clone() for name, tensor in optimiser.state_tensors().items()}
    second = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    resumed = Optimiser(second, frozenset({"head"}), config)
    resumed.load_state_tensors(saved, optimiser.steps)
    for step in range(4, 7):
        for parameter in second.values():
            parameter.grad = gradient(parameter.detach(), step)
        resumed.step()
    assert torch.equal(second["w"], straight)


def test_a_damaged_memory_is_refused_and_another_rules_is_ignored() -> None:
    config = settings(hint="last")
    chosen = parameters()
    optimiser = Optimiser(chosen, frozenset(), config)
    for parameter in chosen.values():
        parameter.grad = torch.ones(3)
    optimiser.step()
    saved = {name: tensor.clone() for name, tensor in optimiser.state_tensors().items()}
    assert {name.partition("/")[0] for name in saved} == {"mean", "square", "auxiliary", "hint"}
    for name in ("square/w", "hint/w"):
        fresh = Optimiser(parameters(), frozenset(), config)
        with pytest.raises(AdaSpecError, match="damaged"):
            fresh.load_state_tensors({k: v for k, v in saved.items() if k != name}, 1)
        assert fresh.state_tensors() == {}
    plain = Optimiser(parameters(), frozenset(), settings(rule="sgd"))
    plain.load_state_tensors(saved, 1)
    assert plain.state_tensors() == {}


def test_warm_up_is_linear_and_the_head_has_a_rate_of_its_own() -> None:
    chosen = parameters()
    config = settings(rule="sgd", warmup_steps=3, head_learning_rate=0.2)
    optimiser = Optimiser(chosen, frozenset({"head"}), config)
    for step in range(5):
        before = {name: p.detach().clone() for name, p in chosen.items()}
        for parameter in chosen.values():
            parameter.grad = torch.ones(3)
        optimiser.step()
        warm = min(1.0, (step + 1) / 4)
        torch.testing.assert_close(before["w"] - chosen["w"], torch.full((3,), 0.1 * warm))
        torch.testing.assert_close(before["head"] - chosen["head"], torch.full((3,), 0.2 * warm))


def test_gradients_are_clipped_and_the_heads_apart() -> None:
    chosen = parameters()
    optimiser = Optimiser(chosen, frozenset({"head"}), settings(clip_norm=1.0))
    chosen["w"].grad, chosen["head"].grad = torch.tensor([30.0, 0, 40]), torch.tensor([0.3, 0, 0.4])
    torch.testing.assert_close(optimiser.clip(), torch.tensor([50.0, 0.5]))
    torch.testing.assert_close(chosen["w"].grad, torch.tensor([0.6, 0, 0.8]))
    torch.testing.assert_close(chosen["head"].grad, torch.tensor([0.3, 0, 0.4]))
