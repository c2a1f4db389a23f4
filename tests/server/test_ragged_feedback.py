"""A learner rebuilds requests exactly when their verify lengths change from step to step."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from adaspec.drafters.checkpoint import read_drafter_config
from adaspec.feedback import FeedbackReceiver, RollbackRecord, open_channel
from adaspec.load.launch import ServerSpec, free_port, start_server
from adaspec.versions import lineage_of
from online.assembly import Assembler
from online.config import IntakeSection
from online.target import load_target_matrices
from online.trajectory import Trajectory
from tests.server.erratic_server import OUTCOMES_VARIABLE
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.reference import ReferenceModel
from tests.server.test_adaspec_requests import PROMPTS
from tests.server.test_hidden_teacher import receive
from tests.server.tiny_models import TAPS

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

LENGTH = 40


@pytest.mark.parametrize("teacher", ["hidden", "top-k"])
def test_tokens_taps_and_teacher_are_the_targets_own(
    tiny_target: Path, tmp_path_factory: pytest.TempPathFactory, teacher: str
) -> None:
    directory = tmp_path_factory.mktemp("r")  # short enough for sockets
    drafter = write_fitted_drafter(directory / "drafter", tiny_target, PROMPTS)
    channel = directory / "channel"
    config, outcomes = directory / "adaspec.toml", directory / "outcomes.jsonl"
    outcomes.touch()
    config.write_text(
        f'[tap]\nenabled = true\nteacher = "{teacher}"\nrefresh_share = 1.0\n'
        f'[channel]\ndirectory = "{channel}"\n'
    )
    spec = ServerSpec(
        target=str(tiny_target),
        port=free_port(),
        drafter=str(drafter),
        dtype="float32",
        config=config,
        extra=("--skip-server-warmup",),
        environment={OUTCOMES_VARIABLE: str(outcomes)},
    )
    log = directory / "server.log"
    requests = {f"{i}-{copy}": prompt for copy in range(3) for i, prompt in enumerate(PROMPTS)}

    def answer(rid: str) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
        found = server.generate(rid=rid, input_ids=requests[rid], sampling_params=sampling)
        return found["output_ids"]

    with start_server(
        spec, log=log, command=command(spec, "tests.server.erratic_server")
    ) as process:
        process.wait_until_healthy(300)
        server = Server(process.url, log)
        receiver = FeedbackReceiver(open_channel(channel).feedback, lineage_of(drafter))
        with ThreadPoolExecutor(6) as pool:
            answers = dict(zip(requests, pool.map(answer, requests), strict=True))
        records = receive(receiver, ends=len(requests))
        receiver.close()

    shape = read_drafter_config(drafter)
    matrices = load_target_matrices(tiny_target, shape, torch.device("cpu"))
    assembler = Assembler(IntakeSection(), shape, matrices)
    trajectories = [
        trajectory
        for record in records
        if not isinstance(record, RollbackRecord)
        for trajectory in assembler.add(record)
    ]
    assert assembler.counters == {"completed": len(requests)}
    reference = ReferenceModel(tiny_target)
    for trajectory in trajectories:
        expected = requests[trajectory.request] + answers[trajectory.request]
        assert trajectory.tokens.tolist() == expected
        check_against_target(trajectory, reference)
    blocks = [block for trajectory in trajectories for block in trajectory.blocks]
    assert {block.verify_length for block in blocks} == set(range(1, 7))
    assert {0, 1, 2, 3} <= {block.accepted for block in blocks}


def check_against_target(trajectory: Trajectory, reference: ReferenceModel) -> None:
    with torch.no_grad():
        output = reference.model(trajectory.tokens[None], output_hidden_states=True)
    states, rows = output.hidden_states, trajectory.rows
    taps = torch.cat([states[layer + 1][0, :rows] for layer in TAPS], dim=-1)
    torch.testing.assert_close(trajectory.taps.float(), taps, rtol=1e-4, atol=1e-4)
    says = output.logits[0, trajectory.prompt_length : rows].argmax(-1)
    assert torch.equal(trajectory.teacher_tokens, says)
