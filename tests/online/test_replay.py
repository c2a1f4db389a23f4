import numpy as np
import torch

from adaspec.feedback import HiddenTeacher, in_share
from online.config import ReplaySection
from online.replay import ReplayBuffer
from online.trajectory import Trajectory


def trajectory(name: str) -> Trajectory:
    return Trajectory(
        name,
        torch.zeros(10, dtype=torch.int64),
        torch.zeros(10, 4),
        2,
        HiddenTeacher(torch.zeros(8, 2)),
        torch.zeros(8, dtype=torch.int64),
        (),
        0.0,
    )


SIZE = trajectory("x").nbytes


def test_held_back_requests_are_never_drawn() -> None:
    buffer = ReplayBuffer(ReplaySection(held_back=0.3, fresh=0))
    for i in range(200):
        buffer.add(trajectory(f"r{i}"))
    buffer.take_new()
    training, held, nbytes = buffer.sizes()
    assert training + held == 200
    assert 30 < held < 90
    assert nbytes == 200 * SIZE
    assert buffer.released == training
    held_names = {t.request for t in buffer.unseen(1000)}
    drawn = {t.request for t in buffer.draw(2000, np.random.default_rng(0))}
    assert not held_names & drawn
    assert all(in_share(name, 0.3, "held-back") for name in held_names)


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    buffer = ReplayBuffer(ReplaySection(bytes=5 * SIZE, held_back=0.0, fresh=0))
    for i in range(9):
        buffer.add(trajectory(f"r{i}"))
    assert buffer.sizes() == (5, 0, 5 * SIZE)
    assert [t.request for t in buffer.take_new()] == [f"r{i}" for i in range(4, 9)]
    drawn = {t.request for t in buffer.draw(500, np.random.default_rng(0))}
    assert drawn == {f"r{i}" for i in range(4, 9)}


def test_a_trajectory_is_drawn_half_as_often_after_its_half_life() -> None:
    buffer = ReplayBuffer(ReplaySection(half_life=10.0, held_back=0.0, fresh=0))
    for i in range(11):
        buffer.add(trajectory(f"r{i}"))
    buffer.take_new()
    drawn = [t.request for t in buffer.draw(20_000, np.random.default_rng(0))]
    ratio = drawn.count("r10") / drawn.count("r0")
    assert 1.7 < ratio < 2.3


def test_the_newest_held_back_are_judged_by() -> None:
    buffer = ReplayBuffer(ReplaySection(held_back=1.0))
    for i in range(10):
        buffer.add(trajectory(f"r{i}"))
    assert [t.request for t in buffer.unseen(3)] == ["r7", "r8", "r9"]
    assert buffer.draw(4, np.random.default_rng(0)) == []


def test_nothing_is_drawn_before_it_was_taken_as_new() -> None:
    buffer, rng = ReplayBuffer(ReplaySection(held_back=0.0, fresh=0)), np.random.default_rng(0)
    buffer.add(trajectory("first"))
    assert buffer.draw(4, rng) == []
    assert [t.request for t in buffer.take_new()] == ["first"]
    assert buffer.take_new() == []
    buffer.add(trajectory("second"))
    assert {t.request for t in buffer.draw(50, rng)} == {"first"}
    assert [t.request for t in buffer.take_new()] == ["second"]
    assert {t.request for t in buffer.draw(50, rng)} == {"first", "second"}


def test_fresh_requests_are_judged_by_before_they_are_drawn() -> None:
    buffer, rng = ReplayBuffer(ReplaySection(held_back=0.3, fresh=5)), np.random.default_rng(0)
    drawn: set[str] = set()
    held: list[str] = []
    others: list[str] = []
    for i in range(60):
        name = f"r{i}"
        (held if in_share(name, 0.3, "held-back") else others).append(name)
        buffer.add(trajectory(name))
        if i % 7 == 0:
            buffer.take_new()
        unseen = [t.request for t in buffer.unseen(8)]
        assert not drawn & set(unseen)
        assert set(others[-5:]) <= set(unseen)
        assert set(unseen) - set(others) == set(held[-(8 - len(others[-5:])) :])
        drawn |= {t.request for t in buffer.draw(200, rng)}
        assert drawn <= set(others[:-5])
        assert buffer.released == max(0, len(others) - 5)
    assert drawn >= set(others[:-20])
    assert [t.request for t in buffer.unseen(3)] == others[-3:]
