"""Policies that a server cannot follow are refused, one's own like the others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.config import VerifyConfig
from adaspec.errors import AdaSpecError
from sglang_patches.worker.policy import check_policy

FIXED, EMA = VerifyConfig(), VerifyConfig(policy="ema")
GOODPUT = VerifyConfig(policy="goodput")
CUSTOM = VerifyConfig(policy="custom", factory="own:make")


def check(config: VerifyConfig, ranks: int = 1, **flags: bool) -> None:
    fields = {"enable_two_batch_overlap": False, "disable_cuda_graph_padding": False}
    server_args: Any = SimpleNamespace(**fields | flags)
    check_policy(config, Path("drafter"), server_args, ranks=ranks)


@pytest.mark.parametrize("config", [EMA, GOODPUT, CUSTOM])
@pytest.mark.parametrize("flag", ["enable_two_batch_overlap", "disable_cuda_graph_padding"])
def test_ragged_steps_refuse_flags_that_fixed_ones_bear(config: VerifyConfig, flag: str) -> None:
    check(config)
    check(FIXED, **{flag: True})
    with pytest.raises(AdaSpecError, match=f'"{config.policy}".*--{flag.replace("_", "-")}'):
        check(config, **{flag: True})


@pytest.mark.parametrize("config", [GOODPUT, CUSTOM])
def test_what_may_differ_between_ranks_runs_on_one(config: VerifyConfig) -> None:
    check(EMA, ranks=2)
    with pytest.raises(AdaSpecError, match=f'"{config.policy}".*--tp-size above 1'):
        check(config, ranks=2)


def test_adaflash_needs_a_length_head() -> None:
    fields: Any = SimpleNamespace(enable_two_batch_overlap=False, disable_cuda_graph_padding=False)
    with pytest.raises(AdaSpecError, match="length head"):
        check_policy(VerifyConfig(policy="adaflash"), Path(BUNDLED_DRAFTER), fields, ranks=1)
