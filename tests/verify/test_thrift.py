"""The share of time that planning may take."""

import itertools

from adaspec.verify.thrift import MOST_STEPS, Thrift


def test_work_is_due_as_often_as_its_share_pays_for() -> None:
    now = 0.0
    thrift = Thrift(0.01, lambda: now)
    done = 0
    for _ in range(1000):
        thrift.earn(1.0)
        if thrift.take():
            with thrift.spending():
                now += 0.05  # five steps' worth
            thrift.done()
            done += 1
    assert 160 <= done <= 210


def test_work_is_never_put_off_for_long() -> None:
    now = 0.0
    thrift = Thrift(0.01, lambda: now)
    due = []
    for step in range(100):
        thrift.earn(1.0)
        if thrift.take():
            due.append(step)
            with thrift.spending():
                now += 100.0
            thrift.done()
    assert [b - a for a, b in itertools.pairwise(due)] == [MOST_STEPS] * (len(due) - 1)


def test_work_under_way_is_not_taken_twice_unless_it_is_lost() -> None:
    thrift = Thrift(0.01, lambda: 0.0)
    assert thrift.take()
    for _ in range(MOST_STEPS - 1):
        thrift.earn(1.0)
        assert not thrift.take()
    thrift.earn(1.0)
    assert thrift.take()
    thrift.done()
    assert thrift.take()
