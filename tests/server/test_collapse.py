"""Acceptance that collapses on a live server is noticed, and its cause is named: in the log and in
the metrics. Each cause that users report is made here for once.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from adaspec.drafters.origin import Expectation, Origin, mark_target, write_origin
from adaspec.load.launch import ServerSpec, free_port, start_server
from tests.server import spoiled_server as spoiled
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.online_loop import wait_for
from tests.server.tiny_models import TAPS, write_target

pytestmark = [pytest.mark.server, pytest.mark.timeout(400), pytest.mark.thorough]

LENGTH = 24
TOPICS = ("apples", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor")
STRANGE = ("zzzzzz", "012345", "%%%%%%", "quorum", "XYLOPH", "[][][]", "vvvvvv", "kkkkkk")
OTHER_TEMPLATE = "{% for m in messages %}<<{{ m['content'] }}>>{% endfor %}"
EXPECTED = Expectation(committed_per_pass=4.5, survival=(0.9, 0.8, 0.7, 0.6, 0.5), setting="a test")


def messages(topic: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me more about {topic}, please."}]


class Pair:
    """The tiny target, a drafter that is fitted to some of its chats, and the drafter's origin."""

    def __init__(self, target: Path, directory: Path) -> None:
        self.target = target
        self.drafter = directory / "drafter"
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.known = [self.prompt(topic) for topic in TOPICS]
        self.strange = [self.prompt(topic) for topic in STRANGE]
        write_fitted_drafter(self.drafter, target, self.known, length=LENGTH + 6)
        marks = mark_target(target)
        write_origin(self.drafter, Origin(target=marks, taps=TAPS, expected=EXPECTED))

    def prompt(self, topic: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages(topic), tokenize=False)
        return self.tokenizer(text, add_special_tokens=False).input_ids


class Serving:
    """A server that can be spoiled, and traffic on it."""

    def __init__(self, server: Server, wrongs: Path) -> None:
        self.server = server
        self._wrongs = wrongs

    def causes(self) -> list[str]:
        """Of the collapse that the metrics show now; none without one."""
        text = httpx.get(f"{self.server.url}/metrics/", timeout=30.0).text
        return [
            sample.labels["cause"]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "adaspec_collapse" and sample.value == 1
        ]

    def told(self) -> list[str]:
        """What the log says of collapses."""
        lines = self.server.log().splitlines()
        return [line for line in lines if "acceptance has collapsed" in line]

    @contextmanager
    def wrong(self, name: str) -> Iterator[None]:
        self._wrongs.write_text(name)
        yield
        self._wrongs.write_text("")

    def ask(self, prompt: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
        self.server.generate(input_ids=prompt, sampling_params=sampling)

    def send(
        self,
        until: Callable[[], bool],
        prompts: Sequence[list[int]] = (),
        ask: Callable[[Server, int], object] | None = None,
        flush_every: int = 0,
        seconds: float = 60.0,
    ) -> None:
        """All prompts at once, again and again until something holds."""
        deadline = time.monotonic() + seconds
        rounds = 0
        with ThreadPoolExecutor(len(TOPICS)) as pool:
            while not until():
                assert time.monotonic() < deadline, (self.causes(), self.told())
                if flush_every and rounds % flush_every == 0:
                    self.server.flush_cache()
                if ask is None:
                    list(pool.map(self.ask, prompts))
                else:
                    list(pool.map(lambda i: ask(self.server, i), range(len(TOPICS))))
                rounds += 1


@contextmanager
def serving(
    pair: Pair, directory: Path, *extra: str, wrong: str = "", drafter: Path | None = None
) -> Iterator[Serving]:
    wrongs, log = directory / "wrongs", directory / "server.log"
    wrongs.write_text(wrong)
    spec = ServerSpec(
        target=str(pair.target),
        port=free_port(),
        drafter=str(drafter or pair.drafter),
        dtype="float32",
        extra=("--enable-metrics", "--skip-server-warmup", *extra),
        environment={spoiled.WRONGS_VARIABLE: str(wrongs)},
    )
    words = command(spec, "tests.server.spoiled_server")
    with start_server(spec, log=log, command=words) as process:
        process.wait_until_healthy(300)
        yield Serving(Server(process.url, log), wrongs)


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tiny_target, tmp_path_factory.mktemp("collapse"))


@pytest.fixture(scope="module")
def lasting(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One server for the tests below, each of which heals it again, but for the last."""
    with serving(pair, tmp_path_factory.mktemp("serving")) as found:
        yield found


@pytest.fixture
def healthy(pair: Pair, lasting: Serving) -> Serving:
    """That server, at work on what its drafter knows."""
    begin = time.monotonic()
    lasting.send(
        lambda: not lasting.causes() and time.monotonic() - begin > 1.5, pair.known, flush_every=2
    )
    return lasting


def test_a_healthy_server_warns_of_nothing(pair: Pair, lasting: Serving) -> None:
    begin = time.monotonic()
    lasting.send(lambda: time.monotonic() - begin > 3.0, pair.known, flush_every=2)
    assert lasting.causes() == []
    assert lasting.told() == []
    assert "the drafter" not in "".join(warnings(lasting))


def warnings(serving: Serving) -> list[str]:
    """What the alarm's modules have warned of, as far as their words tell."""
    parts = ("was trained with", "was trained for", "were quantised", "is quantised")
    return [line for line in serving.server.log().splitlines() if any(p in line for p in parts)]


def test_a_draft_cache_that_does_not_fit_is_the_prefix_caches(pair: Pair, healthy: Serving) -> None:
    told = len(healthy.told())
    with healthy.wrong(spoiled.PREFIX):
        # Every second time, requests find their prompts in the cache.
        healthy.send(lambda: healthy.causes() == ["prefix cache"], pair.known, flush_every=2)
        assert "/flush_cache" in healthy.told()[told]
    healthy.server.flush_cache()
    healthy.send(lambda: not healthy.causes(), pair.known, flush_every=2)


def test_traffic_that_the_drafter_does_not_know_is_called_so(pair: Pair, healthy: Serving) -> None:
    told = len(healthy.told())
    healthy.send(lambda: healthy.causes() == ["traffic"], pair.strange)
    assert "nothing about the server has changed" in healthy.told()[told]
    healthy.send(lambda: not healthy.causes(), pair.known)


def test_a_target_that_is_updated_alone_is_named(pair: Pair, healthy: Serving) -> None:
    told = len(healthy.told())
    with healthy.wrong(spoiled.TARGET):
        healthy.send(lambda: healthy.causes() == ["target weights"], pair.known)
        assert "the target's weights have changed" in healthy.told()[told]
    healthy.server.flush_cache()
    healthy.send(lambda: not healthy.causes(), pair.known)


def test_weights_that_were_overwritten_are_named(
    pair: Pair, healthy: Serving, tmp_path: Path
) -> None:
    """The last one: SGLang loads the other target's layers into the drafter, too."""
    told = len(healthy.told())
    other = write_target(tmp_path / "other", seed=9)
    answer = healthy.server.post("/update_weights_from_disk", model_path=str(other))
    assert answer["success"], answer
    healthy.send(lambda: healthy.causes() == ["weights"], pair.known)
    assert "restart the server" in healthy.told()[told]


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def chat(server: Server, i: int) -> None:
    server.post(
        "/v1/chat/completions",
        model="default",
        messages=messages(TOPICS[i]),
        temperature=0,
        max_tokens=LENGTH,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("wrong", "cause"), [(spoiled.HEAD, "head"), (spoiled.DRAFTER, "drafter quantised")]
)
def test_rounded_weights_are_named(pair: Pair, tmp_path: Path, wrong: str, cause: str) -> None:
    with serving(pair, tmp_path, wrong=wrong) as found:
        assert warnings(found), "it is said at the start"
        found.send(lambda: found.causes() == [cause], pair.known)


def test_wrong_taps_are_named(pair: Pair, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(pair.drafter, drafter)

    def swap_taps(config: dict) -> None:
        taps: Mapping[str, list[int]] = config["dflash_config"]
        config["dflash_config"]["target_layer_ids"] = taps["target_layer_ids"][::-1]

    edit(drafter / "config.json", swap_taps)
    with serving(pair, tmp_path, drafter=drafter) as found:
        assert "restore target_layer_ids" in "".join(warnings(found))
        found.send(lambda: found.causes() == ["taps"], pair.known)


def test_another_template_is_named_and_the_drafters_own_is_not(pair: Pair, tmp_path: Path) -> None:
    with serving(pair, tmp_path) as found:
        begin = time.monotonic()
        found.send(lambda: time.monotonic() - begin > 5, ask=chat)
        assert (found.causes(), warnings(found)) == ([], [])
    template = tmp_path / "other.jinja"
    template.write_text(OTHER_TEMPLATE)
    with serving(pair, tmp_path, "--chat-template", str(template)) as found:
        assert "another chat template" in "".join(warnings(found))
        found.send(lambda: found.causes() == ["template"], ask=chat)


def test_a_drafter_without_an_origin_that_never_works_is_said_to_be_so(
    pair: Pair, tmp_path: Path, tiny_drafter: Path
) -> None:
    with serving(pair, tmp_path, drafter=tiny_drafter) as found:
        found.send(lambda: found.causes() == ["unknown"], pair.known)
        wait_for(lambda: "has no origin.json" in "".join(found.told()))
