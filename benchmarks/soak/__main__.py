"""Does anything grow, leak, get lost or come out wrong in an hour of mixed traffic?

    python -m benchmarks.soak --minutes 60 --out soak.json

`adaspec serve --online` serves SmolLM2 with the bundled drafter while requests of every kind come
in steadily and in bursts (`traffic.py`), learning and swaps go on, and the server's memory is so
small that long prompts are chunked, requests retracted and prefixes evicted. Before, a server
without speculation gives the right answer to every greedy prompt. Exits with 1 if a request was
lost, an answer changed, or KV slots are in use when all is over.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import httpx
import psutil

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.load.launch import ServerSpec, free_port, running_server, start_server
from adaspec.load.machine import machine_facts
from adaspec.load.prompts import load_prompts
from adaspec.monitor import fetch
from adaspec.target.smollm2 import ensure_smollm2
from benchmarks.soak.readings import (
    Growth,
    Reading,
    as_documents,
    growth,
    read,
    wait_until_idle,
)
from benchmarks.soak.traffic import Asked, Traffic, reference

_EVERY_S = 10.0
_SERVER = "--enable-metrics --max-running-requests 8 --max-total-tokens 1280 "
_SERVER += "--chunked-prefill-size 256 --schedule-conservativeness 0.1"
# Publishes now and then, whatever it gains: swaps are what is looked at.
_LEARN = """
[batch]
trajectories = 2
blocks = 8
passes = 4.0
[optimiser]
learning_rate = 1e-4
[pace]
patience = 0
[gate]
every_steps = 10
min_requests = 4
max_requests = 8
passes = 4
tolerance = 0.5
"""


def serve_online(spec: ServerSpec, learn: Path) -> list[str]:
    """The command of `adaspec serve --online`."""
    command = [sys.executable, "-m", "adaspec.cli.main", "serve", "--target", spec.target]
    command += ["--drafter", str(spec.drafter), "--port", str(spec.port), "--dtype", "float32"]
    command += ["--online", "--learn-config", str(learn), "--log", "-", "--", *spec.extra]
    return command


def questions(options: argparse.Namespace) -> tuple[list[Asked], list[Asked]]:
    """Greedy requests, short and long."""
    prompts = load_prompts(options.prompts)
    short = [Asked(prompt, 40) for prompt in prompts[: options.distinct]]
    words = " ".join(prompts).split(" ")
    length = 400  # words, some 550 tokens
    around = words * (2 + length // len(words))
    step = max(1, len(words) // options.distinct)
    starts = range(0, len(words), step)[: options.distinct]
    long = [Asked(" ".join(around[start : start + length]), 48) for start in starts]
    return short, long


def soak(options: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Run it; the report."""
    target = str(ensure_smollm2(progress=print))
    short, long = questions(options)
    extra = tuple(_SERVER.split())
    plain = ServerSpec(target=target, port=free_port(), dtype="float32", extra=extra)
    with running_server(plain, log=directory / "plain.log") as server:
        right = [asyncio.run(reference(server.url, requests)) for requests in (short, long)]
    print(f"{sum(map(len, right))} right answers are known", flush=True)
    learn = directory / "learn.toml"
    learn.write_text(_LEARN)
    spec = ServerSpec(
        target=target,
        drafter=str(BUNDLED_DRAFTER),
        port=free_port(),
        extra=extra,
        environment={"ADASPEC_CACHE": str(directory / "cache")},
    )
    log = directory / "online.log"
    with start_server(spec, log=log, command=serve_online(spec, learn)) as server:
        server.wait_until_healthy(600)
        traffic = Traffic(
            server.url, *right, steady=options.steady, burst=options.burst, seed=options.seed
        )
        root, start = psutil.Process(server.process.pid), time.monotonic()
        until = start + 60 * options.minutes
        sender = threading.Thread(target=lambda: asyncio.run(traffic.run(until)))
        sender.start()
        readings: list[Reading] = []
        with httpx.Client(timeout=60.0) as client:
            while sender.is_alive():
                readings.append(read(root, client, server.url, time.monotonic() - start))
                if len(readings) % 30 == 1:
                    show(readings[-1], traffic)
                sender.join(_EVERY_S)
            left = wait_until_idle(client, server.url)
            scrape = fetch(client, server.url)
        seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    tally = traffic.tally
    return {
        "machine": machine_facts(),
        "settings": {"server": _SERVER, "learner": _LEARN, "minutes": options.minutes}
        | {key: getattr(options, key) for key in ("steady", "burst", "distinct", "seed")},
        "seconds": seconds,
        "requests": dict(tally.done),
        "most_in_flight": tally.most_in_flight,
        "lost": tally.lost,
        "changed": tally.changed,
        "kv_left": left,
        "versions": int(scrape.total("adaspec_learner", quantity="published")),
        "swaps": int(scrape.total("adaspec_swaps_total")),
        "retracted": text.count("KV cache pool is full. Retract requests"),
        "tracebacks": text.count("Traceback"),
        "growth": [asdict(g) for g in growth(readings, 60 * options.warm_up)],
        "most_waiting_requests": max(r.queued for r in readings),
        "readings": as_documents(readings),
    }


def show(reading: Reading, traffic: Traffic) -> None:
    """A line of progress."""
    sizes = ", ".join(f"{name} {size >> 20}" for name, size in sorted(reading.resident.items()))
    tally = traffic.tally
    print(
        f"{reading.at:6.0f} s: {tally.done.total()} done, {len(tally.lost)} lost, "
        f"{len(tally.changed)} changed, version {reading.version}; MiB: {sizes}",
        flush=True,
    )


def table(report: dict[str, object]) -> str:
    """What the documents show."""
    lines = ["| process | MiB after the warm-up | MiB at the end | MiB an hour (95 %) |"]
    lines += ["|---|---|---|---|"]
    for row in report["growth"]:  # type: ignore[attr-defined]
        g = Growth(**row)
        slope = f"{g.per_hour:+.1f} [{g.low:+.1f}, {g.high:+.1f}]"
        lines.append(f"| {g.process} | {g.first:.0f} | {g.last:.0f} | {slope} |")
    return "\n".join(lines)


def main() -> None:
    """Run it, write the report, say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--distinct", type=int, default=24, help="greedy prompts of each kind")
    parser.add_argument("--steady", type=int, default=4, help="clients that always send")
    parser.add_argument("--burst", type=int, default=12, help="clients of the bursts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="directory; default: one that is deleted")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logs: Path = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        report = soak(options, logs)
    options.out.write_text(json.dumps(report) + "\n")
    facts = {k: report[k] for k in ("requests", "versions", "swaps", "retracted", "kv_left")}
    print(table(report), facts, *report["lost"], *report["changed"], sep="\n")  # type: ignore[misc]
    if report["lost"] or report["changed"] or report["kv_left"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
