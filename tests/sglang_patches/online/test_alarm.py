"""The alarm: what it counts, that it tells a collapse once, and when it ends."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest
from torch import nn

from sglang_patches.online.alarm import CollapseAlarm, start_alarm
from sglang_patches.online.collapse import CollapseDetector, SeenRequest
from sglang_patches.online.diagnosis import Checks

BLOCK = 8


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """An alarm, steps to count, and what it has shown."""

    def __init__(self, wrong: list[str] | None = None) -> None:
        self.clock = Clock()
        self.wrong = wrong or []
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.shown: list[str | None] = []
        checks = Checks(self.drafter, lambda: [], [], True, lambda: 0)
        self.alarm = CollapseAlarm(CollapseDetector(None, self.clock), checks, self.shown.append)
        self.steps = 0

    def drafter(self) -> list[str]:
        self.asked += 1
        assert self.may_answer.wait(20)
        if self.wrong == ["a broken check"]:
            raise RuntimeError("the check breaks")
        return self.wrong

    def run(self, steps: int, accepted: int, by_base: bool = False) -> None:
        """Steps of eight requests, which are others after every twenty."""
        for _ in range(steps):
            self.steps += 1
            self.clock.now += 0.02
            names = [f"{self.steps // 20}-{i}" for i in range(8)]
            seen = [SeenRequest(name, False, True) for name in names]
            # Requests differ a little, or there would be no noise to tell anything from.
            counts = [max(accepted - (i + self.steps) % 2, 0) for i in range(8)]
            self.alarm.count(seen, counts, [BLOCK] * 8, by_base)

    def wait_for_shown(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.shown) < count:
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.005)


def test_a_healthy_server_is_silent() -> None:
    server = Server()
    server.run(3000, accepted=4)
    assert (server.shown, server.asked) == ([], 0)


def test_a_collapse_is_explained_once_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(wrong=["norm.weight"])
    server.run(1500, accepted=4)
    with caplog.at_level(logging.INFO):
        server.run(1500, accepted=0)
        server.wait_for_shown(1)
        assert (server.shown, server.asked) == (["weights"], 1)
        server.run(1500, accepted=4)
    assert server.shown == ["weights", None]
    (told,) = [r for r in caplog.records if "has collapsed" in r.message]
    assert told.levelno == logging.ERROR
    assert "norm.weight" in told.message
    assert "acceptance is back" in caplog.text


def test_a_change_of_traffic_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.run(1500, accepted=4)
    server.run(1500, accepted=0)
    server.wait_for_shown(1)
    assert server.shown == ["traffic"]
    (told,) = [r for r in caplog.records if "has collapsed" in r.message]
    assert told.levelno == logging.WARNING


def test_another_version_ends_the_alarm_and_a_late_diagnosis_is_not_shown() -> None:
    server = Server(wrong=["norm.weight"])
    server.may_answer.clear()
    server.run(1500, accepted=0)
    deadline = time.monotonic() + 20
    while not server.asked:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    server.alarm.drafter_changed()
    server.may_answer.set()
    time.sleep(0.1)
    assert server.shown == [None]


def test_a_collapse_is_told_even_if_its_cause_cannot_be_looked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(wrong=["a broken check"])
    server.run(1500, accepted=0)
    server.wait_for_shown(1)
    assert server.shown == ["unknown"]
    assert "the check breaks" in caplog.text


def test_the_base_in_control_windows_does_not_count_for_the_version() -> None:
    server = Server()
    server.run(3000, accepted=0, by_base=True)
    assert server.shown == []


def request(name: str, cached: int, top_k: int) -> SimpleNamespace:
    return SimpleNamespace(
        rid=name,
        cached_tokens=cached,
        origin_input_ids=[0] * 10,
        sampling_params=SimpleNamespace(top_k=top_k),
    )


def test_requests_are_seen_with_their_prefix_and_sampling() -> None:
    server = Server()
    seen = server.alarm.look([request("a", 5, 1), request("b", 4, 50)])
    assert seen == (SeenRequest("a", True, True), SeenRequest("b", False, False))


def test_large_steps_are_left_out_in_proportion() -> None:
    server = Server()
    reqs = [request(str(i), 0, 1) for i in range(64)]
    looked = [server.alarm.look(reqs) is not None for _ in range(100)]
    assert sum(looked) == pytest.approx(50, abs=1)


def test_weights_that_change_without_a_swapper_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_patches.online import alarm
    from sglang_patches.online.served import Served

    monkeypatch.setattr(alarm, "check_pairing", lambda worker: (None, []))
    drafter, target = nn.Linear(4, 4), nn.Linear(4, 4)
    worker = SimpleNamespace(draft_model=drafter, model_runner=SimpleNamespace(model=target))
    started = start_alarm(worker, Served(7, ""), None, None)
    checks = started._checks
    assert (checks.drafter(), checks.target(), checks.version()) == ([], [], 7)
    assert not checks.has_origin
    drafter.weight.data.mul_(2)
    target.bias.data.zero_()
    assert (checks.drafter(), checks.target()) == (["weight"], ["bias"])
