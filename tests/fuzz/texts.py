"""Targets: settings that users write, the monitor's page, and what it reads from a server."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from adaspec.config import AdaSpecConfig, load_config, write_config
from adaspec.errors import AdaSpecError
from adaspec.monitor import Monitor, parse, web
from adaspec.monitor.web import Watcher, application
from online.config import LearnConfig, load_learn_config
from tests.fuzz.files import of_file
from tests.fuzz.messages import pack, unpack
from tests.fuzz.mutation import either, mutate_msgpack, mutate_toml
from tests.fuzz.target import Target, attempt
from tests.monitor.test_monitor import LATER, text_of

PACKAGE = Path(web.__file__).parent
NESTED = b"x = " + b"[" * 100_000


def _toml(config: AdaSpecConfig | LearnConfig) -> bytes:
    """All settings of a configuration as a file."""
    lines: list[str] = []

    def add(name: str, values: dict[str, object]) -> None:
        plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
        lines.extend([f"[{name}]"] if name else [])
        lines.extend(
            f"{key} = {msgspec.json.encode(value).decode()}"
            for key, value in plain.items()
            if value is not None
        )
        for key, value in values.items():
            if isinstance(value, dict):
                add(f"{name}.{key}".lstrip("."), value)

    add("", msgspec.to_builtins(config))
    return "\n".join(lines).encode()


def server_settings(directory: Path) -> Target:
    """The server's settings, which `adaspec serve --online` also writes."""
    path, again = directory / "adaspec.toml", directory / "again.toml"

    def read() -> bool:
        config = load_config(path)
        write_config(config, again)
        assert load_config(again) == config
        return True

    used = b'[channel]\ndirectory = "/run/adaspec"\nstore = "/var/lib/adaspec"\n'
    policy = b'[verify]\npolicy = "custom"\nfactory = "mine:make"\n[verify.ema]\nmargin = 3.5\n'
    found = {
        "nesting": NESTED,
        "not UTF-8": b"\xff\xfe",
        "an endless number": b"[verify]\nlength = " + b"9" * 5000,
        "NaN": b"[verify.ema]\nmargin = nan\n",
        "more than 1 MiB": b"#" * (1 << 21),
    }
    seeds = [b"", _toml(AdaSpecConfig()), used, policy]
    return Target(of_file(path, read), seeds, either(mutate_toml), found)


def learner_settings(directory: Path) -> Target:
    """The learner's settings."""
    path = directory / "learn.toml"

    def read() -> bool:
        config = load_learn_config(path)
        again = msgspec.json.decode(msgspec.json.encode(config), type=LearnConfig)
        # JSON has no infinity: such a setting reads back as none.
        assert again == config or b"inf" in path.read_bytes().lower()
        return True

    seeds = [b"", _toml(LearnConfig())]
    return Target(of_file(path, read), seeds, either(mutate_toml), {"nesting": NESTED})


def page(directory: Path) -> Target:
    """Requests to the monitor's page: path, query and host; nothing but its own files is served."""
    watcher = Watcher(Monitor("http://server:30000", 30.0), "u", 1.0, lambda _: None)
    served = application(watcher, "127.0.0.1")
    files = {path.read_bytes() for path in (PACKAGE / "page").iterdir()}

    def check(data: bytes) -> bool:
        path, query, host, *_ = [*unpack(data), b"", b"", b""]
        scope = {
            "type": "http", "method": "GET", "query_string": query, "headers": [(b"host", host)],
            "raw_path": path, "path": path.decode("latin-1"), "root_path": "", "scheme": "http",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "http_version": "1.1",
        }  # fmt: skip
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(dict(message))

        asyncio.run(served(scope, receive, send))
        status, headers = sent[0]["status"], dict(sent[0]["headers"])
        assert status in (200, 307, 400, 404, 405), status
        if status == 200 and headers[b"content-type"] != b"application/json":
            assert b"".join(part.get("body", b"") for part in sent[1:]) in files
        return bool(status == 200)

    seeds = [
        pack([b"/", b"", b"localhost"]),
        pack([b"/data", b"after=1700000000.5", b"127.0.0.1:30090"]),
        pack([b"/page/index.html", b"", b"localhost"]),
    ]
    found = {
        "a NUL": pack([b"/page/\0", b"", b"localhost"]),
        "a file above": pack([b"/page/../web.py", b"", b"localhost"]),
        "a long name": pack([b"/page/" + b"x" * 5000, b"", b"localhost"]),
    }
    return Target(check, seeds, either(mutate_msgpack), found)


def metrics_page(directory: Path) -> Target:
    """A server's /metrics, which the monitor reads."""

    def check(data: bytes) -> bool:
        text = data.decode("utf-8", "replace")
        scrape = attempt(lambda: parse(text, now=1.0), AdaSpecError)
        if scrape is None:
            return False
        monitor = Monitor("u", 30.0)
        monitor.see(scrape)
        msgspec.json.encode(monitor.report(2.0))
        return True

    return Target(check, [text_of(LATER).encode()], either(mutate_toml, 0.2))


TEXTS = {
    "server-settings": server_settings,
    "learner-settings": learner_settings,
    "page": page,
    "metrics-page": metrics_page,
}
