"""Policies that a server or a drafter cannot follow are refused at start, in a sentence."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.config import VerifyConfig
from adaspec.errors import AdaSpecError
from sglang_patches.worker.policy import check_policy, load_length_head

DRAFTER = Path(BUNDLED_DRAFTER)


def check(policy: str, *, ranks: int = 1, **flags: bool) -> None:
    options = {"enable_two_batch_overlap": False, "disable_cuda_graph_padding": False} | flags
    config = VerifyConfig(policy=policy)  # type: ignore[arg-type]
    check_policy(config, DRAFTER, SimpleNamespace(**options), ranks=ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["fixed", "ema", "goodput"])
def test_an_ordinary_server_takes_every_policy_that_its_drafter_can_follow(policy: str) -> None:
    check(policy)


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("enable_two_batch_overlap", "--enable-two-batch-overlap"),
        ("disable_cuda_graph_padding", "--disable-cuda-graph-padding"),
    ],
)
@pytest.mark.parametrize("policy", ["ema", "goodput"])
def test_lengths_that_differ_do_not_go_with_these_flags(policy: str, flag: str, name: str) -> None:
    with pytest.raises(AdaSpecError, match=f'"{policy}" verifies different lengths.*{name}'):
        check(policy, **{flag: True})
    check("fixed", **{flag: True})


def test_goodput_decides_by_one_clock() -> None:
    with pytest.raises(AdaSpecError, match="--tp-size above 1"):
        check("goodput", ranks=2)
    check("ema", ranks=2)


def test_adaflash_needs_a_length_head() -> None:
    with pytest.raises(AdaSpecError, match="length head"):
        check("adaflash")
    assert load_length_head(DRAFTER, torch.device("cpu")) is None
