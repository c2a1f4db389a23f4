"""What users say stays in memory, and is not used at all where they forbid it."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from adaspec.feedback import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    FeedbackReceiver,
    open_channel,
)
from adaspec.load.launch import ServerSpec, free_port, start_server
from adaspec.versions import VersionStore, lineage_of
from tests.server.launch import Server
from tests.server.online_loop import LENGTH, Learner, generate, write_server_config

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

SECRET = "qZx-Wv!kJ7"
PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(12)]


@pytest.fixture
def server(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> Iterator[Server]:
    spec = ServerSpec(
        target=str(tiny_target),
        port=free_port(),
        drafter=str(tiny_drafter),
        dtype="float32",
        config=write_server_config(tmp_path, refresh_share=1.0),
        # SGLang itself logs requests only if it is asked to.
        extra=("--log-level", "debug", "--enable-metrics"),
    )
    log = tmp_path / "server.log"
    with start_server(spec, log=log) as process:
        process.wait_until_healthy(300)
        yield Server(process.url, log)


def complete(server: Server, prompt: str, **more: Any) -> dict[str, Any]:
    """The answer of the OpenAI-compatible endpoint."""
    body = {"model": "m", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120.0)
    answer.raise_for_status()
    return dict(answer.json())


def test_what_users_say_stays_in_memory(
    server: Server, tiny_drafter: Path, tiny_target: Path, tmp_path: Path
) -> None:
    receiver = FeedbackReceiver(
        open_channel(tmp_path / "channel").feedback, lineage_of(tiny_drafter)
    )
    forbid = {"custom_params": {"adaspec_learn": False}}
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    generate(server, PROMPTS[0], "allowed")
    server.generate(input_ids=PROMPTS[1], rid="forbidden", sampling_params={**sampling, **forbid})
    secret = complete(server, SECRET, **forbid)
    told = complete(server, "hello there")
    records: list[ContextRecord | BlockRecord | EndRecord] = []
    while not any(isinstance(r, EndRecord) and r.request == told["id"] for r in records):
        record = receiver.receive(30.0)
        assert record is not None
        records.append(record)
    while (late := receiver.receive(2.0)) is not None:
        records.append(late)
    receiver.close()
    # The server's own warm-up is among them; what was said last comes last.
    requests = {record.request for record in records}
    assert {"allowed", told["id"]} <= requests
    assert not {"forbidden", secret["id"]} & requests
    ids = [r.token_ids.tolist()[:5] for r in records if isinstance(r, ContextRecord)]
    assert PROMPTS[0] in ids
    assert PROMPTS[1] not in ids

    # Now everything that is said is learned from, and looked for wherever something is written.
    learner = Learner(tiny_drafter, tiny_target, tmp_path)
    learner.start()
    store = tmp_path / "store"
    deadline = time.monotonic() + 120
    while not (store / "CURRENT").exists() or VersionStore(store).current().number == 0:
        assert time.monotonic() < deadline, learner.log()[-2000:]
        for prompt in PROMPTS:
            generate(server, prompt)
        complete(server, SECRET * 3)
    with pytest.raises(httpx.HTTPStatusError):
        complete(server, SECRET, temperature=-1)  # a refused request, too
    assert learner.end(signal.SIGTERM) == 0
    traces = [SECRET.encode()]
    for tokens in ([ord(c) for c in SECRET], PROMPTS[0]):
        traces += [str(tokens).strip("[]").encode()]
        traces += [np.array(tokens, dtype).tobytes() for dtype in ("<i4", "<i8")]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".log", ".safetensors", ".jsonl"}
    for path in files:
        content = path.read_bytes()
        assert not [trace for trace in traces if trace in content], path
