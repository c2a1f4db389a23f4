"""The worker's metrics on a live server that has no learner."""

from pathlib import Path

import pytest

from adaspec.load.launch import ServerSpec, free_port, start_server
from tests.server.launch import Server
from tests.server.online_loop import LENGTH, generate, metric, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]


def test_steps_are_counted_without_a_learner(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    spec = ServerSpec(
        target=str(tiny_target),
        port=free_port(),
        drafter=str(tiny_drafter),
        dtype="float32",
        extra=("--enable-metrics", "--skip-server-warmup"),
    )
    log = tmp_path / "server.log"
    with start_server(spec, log=log) as process:
        process.wait_until_healthy(300)
        server = Server(process.url, log)
        requests = [generate(server, [5, 40 + i, 90]) for i in range(3)]
        passes = sum(answer["meta_info"]["spec_verify_ct"] for answer in requests)

        def counted() -> float:
            return metric(server, "adaspec_target_passes_total", version="0", verify_length="4")

        wait_for(lambda: counted() >= passes)
        committed = metric(server, "adaspec_committed_tokens_total", version="0")
        # Health checks are requests, too.
        assert committed >= 3 * (LENGTH - 1)
        assert metric(server, "adaspec_accepted_length_count", version="0") == counted()
        steps = metric(server, "adaspec_step_seconds_count", batch="1", tokens="4")
        assert 3 * 10 < steps < counted()
        assert metric(server, "adaspec_live_version") == 0
