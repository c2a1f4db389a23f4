"""Every policy of the verify length leaves the output as it is, and so do lengths that are drawn
anew for every request and step.

The kinds of requests are those of `test_adaspec_requests`; other requests run beside them all the
time, so that batches are ragged.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from adaspec.drafters.checkpoint import load_drafter, read_drafter_config, save_drafter
from adaspec.drafters.network import BlockDrafter
from adaspec.load.launch import ServerSpec, free_port, start_server
from tests.server.checked_traffic import CheckedTraffic
from tests.server.erratic_server import OUTCOMES_VARIABLE, Outcome, read_outcomes
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.reference import ReferenceModel
from tests.server.test_adaspec_requests import (  # noqa: F401
    LENGTH,
    PROMPTS,
    generate,
    test_a_batch_of_every_kind_leaves_greedy_requests_alone,
    test_an_abandoned_stream_frees_its_place,
    test_end_of_sequence_waits_for_min_new_tokens,
    test_grammars_hold_and_are_the_targets_choice,
    test_greedy_output_is_the_targets_alone_and_together,
    test_log_probabilities_are_the_targets,
    test_logit_bias_forbids_a_token,
    test_penalties_count_every_generated_token,
    test_prefix_hits_and_long_prompts_change_nothing,
    test_several_answers_to_one_prompt,
    test_stop_strings_end_the_answer_inside_a_block,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

BLOCK = 16
ERRATIC = "tests.server.erratic_server"
EVERY_POLICY = {
    "erratic": (),
    "erratic-no-overlap": ("--disable-overlap-schedule",),
    "goodput": (),
    "ema": (),
    "adaflash": (),
}
ALWAYS_TESTED = ("erratic", "goodput")


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted on what the tests ask, with a length head of random weights."""
    directory = tmp_path_factory.mktemp("fitted")
    options = {"length": 32, "block_size": BLOCK}
    fitted = write_fitted_drafter(directory / "fitted", tiny_target, PROMPTS, **options)
    config = replace(read_drafter_config(fitted), length_head_width=8)
    with_head = BlockDrafter(config)
    missing = with_head.load_state_dict(load_drafter(fitted).state_dict(), strict=False)
    assert {name.partition(".")[0] for name in missing.missing_keys} == {"thresh_head_two_model"}
    torch.manual_seed(0)
    for parameter in with_head.thresh_head_two_model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_drafter(with_head, directory / "drafter", dtype=torch.float32)
    return directory / "drafter"


@pytest.fixture(scope="module")
def reference(tiny_target: Path) -> ReferenceModel:
    return ReferenceModel(tiny_target)


class Policy(NamedTuple):
    """A running server, and where an erratic one writes down what its policy is shown."""

    server: Server
    outcomes: Path

    def seen(self) -> list[Outcome]:
        return read_outcomes(self.outcomes)


@contextmanager
def running(
    name: str,
    target: Path,
    drafter: Path,
    directory: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
) -> Iterator[Policy]:
    erratic = name.startswith("erratic")
    config = directory / "adaspec.toml"
    config.write_text("" if erratic else f'[verify]\npolicy = "{name}"\n')
    outcomes, log = directory / "outcomes.jsonl", directory / "server.log"
    outcomes.touch()
    spec = ServerSpec(
        target=str(target),
        port=free_port(),
        drafter=str(drafter),
        config=config,
        extra=("--chunked-prefill-size", "64", *arguments),
        environment={OUTCOMES_VARIABLE: str(outcomes), **(environment or {})},
    )
    with start_server(
        spec, log=log, command=command(spec, ERRATIC if erratic else "sglang.launch_server")
    ) as process:
        process.wait_until_healthy(300)
        yield Policy(Server(process.url, log), outcomes)


@pytest.fixture(
    scope="module",
    params=[
        name if name in ALWAYS_TESTED else pytest.param(name, marks=pytest.mark.thorough)
        for name in EVERY_POLICY
    ],
)
def policy(
    request: pytest.FixtureRequest,
    tiny_target: Path,
    drafter: Path,
    reference: ReferenceModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Policy]:
    directory = tmp_path_factory.mktemp("policy")
    arguments = ("--enable-custom-logit-processor", *EVERY_POLICY[request.param])
    expected = [reference.greedy(prompt, LENGTH) for prompt in PROMPTS]
    with ExitStack() as stack:
        found = stack.enter_context(
            running(request.param, tiny_target, drafter, directory, *arguments)
        )
        traffic = CheckedTraffic(found.server, PROMPTS, expected)
        stack.callback(traffic.close)
        yield found
        traffic.close()
        assert traffic.served > 0
        assert traffic.failures == []


@pytest.fixture(scope="module")
def server(policy: Policy) -> Server:
    return policy.server


@pytest.mark.parametrize(
    "policy",
    ["erratic", pytest.param("erratic-no-overlap", marks=pytest.mark.thorough)],
    indirect=True,
)
def test_the_policy_sees_what_became_of_its_steps(policy: Policy) -> None:
    for _ in range(4):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            list(pool.map(lambda prompt: generate(policy.server, prompt), PROMPTS))
    seen = policy.seen()
    drafted = [outcome for outcome in seen if outcome.drafted]
    lengths = [outcome.lengths for outcome in drafted]
    assert {length for step in lengths for length in step} == set(range(1, BLOCK + 1))
    assert any(len(set(step)) > 2 for step in lengths)
    for outcome in drafted:
        assert sum(outcome.lengths) == outcome.tokens
        assert len(outcome.lengths) == len(outcome.accepted) == len(outcome.requests)
        assert all(a < n for a, n in zip(outcome.accepted, outcome.lengths, strict=True))
        assert all(p <= 0 for row in outcome.log_probs for p in row)
    accepted = {a for outcome in drafted for a in outcome.accepted}
    assert {0, 1, 2, 5} <= accepted
    plain = [outcome for outcome in seen if not outcome.drafted]
    assert plain
    assert all(outcome.tokens == len(outcome.requests) for outcome in plain)
    times = [outcome.seconds for outcome in seen]
    assert None in times  # beside a prefill
    known = [seconds for seconds in times if seconds is not None]
    assert len(known) > len(times) / 4
    assert all(0 < seconds < 60 for seconds in known)


def test_custom_processors_see_the_rows_of_their_request(policy: Policy) -> None:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    banned = generate(policy.server, PROMPTS[0])["output_ids"][3]
    answer = policy.server.generate(
        input_ids=PROMPTS[0],
        custom_logit_processor=DisallowedTokensLogitsProcessor.to_str(),
        sampling_params={
            "temperature": 0,
            "max_new_tokens": LENGTH,
            "ignore_eos": True,
            "custom_params": {"token_ids": [banned]},
        },
    )
    assert banned not in answer["output_ids"]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_retracted_requests_go_on_as_if_nothing_had_happened(
    tiny_target: Path, drafter: Path, reference: ReferenceModel, tmp_path: Path, overlap: bool
) -> None:
    expected = [reference.greedy(prompt, LENGTH) for prompt in PROMPTS]
    arguments = () if overlap else ("--disable-overlap-schedule",)
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    with running(
        "erratic", tiny_target, drafter, tmp_path, *arguments, environment=environment
    ) as policy:
        for _ in range(3):
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                answers = list(pool.map(lambda p: generate(policy.server, p), PROMPTS))
            assert [answer["output_ids"] for answer in answers] == expected
        assert "retract" in policy.server.log().lower()
