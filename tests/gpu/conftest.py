"""Tests that need a CUDA GPU: `pytest tests/gpu`, with the stock attention backend in Triton.

Everywhere else they are skipped.
"""

from pathlib import Path

import pytest
import torch

from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.tiny_models import write_target

PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(6)]

# One small pool, and few graphs: capturing and compiling is what a cold start spends its time on.
SERVER_ARGUMENTS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "1", "2", "4", "8"),
    *("--max-running-requests", "8", "--max-total-tokens", "16384"),
    *("--mem-fraction-static", "0.3", "--chunked-prefill-size", "64"),
)


@pytest.fixture(autouse=True, scope="session")
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 512 tokens and three layers."""
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of block size 6 that is often right after `PROMPTS`."""
    return write_fitted_drafter(tmp_path_factory.mktemp("tiny") / "drafter", target, PROMPTS)
