"""The verdict of a step without drafts: plain decoding, in few operations."""

import torch

from adaspec.acceptance import accept_greedy
from adaspec.chains import ChainRows
from sglang_patches.worker.accept import make_verdict


def test_a_plain_step_commits_the_targets_token() -> None:
    tokens, argmax = torch.tensor([[4], [5], [6]]), torch.tensor([7, 8, 9])
    rows = ChainRows.uniform(3, 1, torch.device("cpu"))
    verdict = make_verdict(tokens, accept_greedy(tokens[:, 1:], argmax, rows))
    assert verdict.committed.tolist() == [[7], [8], [9]]
    assert verdict.commit_lens.tolist() == [1, 1, 1]
    assert verdict.commit_lens.dtype == torch.int32
    assert verdict.bonus.tolist() == [7, 8, 9]
