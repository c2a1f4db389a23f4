import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adaspec.errors import AdaSpecError
from adaspec.feedback import HiddenTeacher
from online.target import TargetMatrices, load_target_matrices
from tests.online.world import DRAFTER, Request, TinyTarget, teacher_of

CPU = torch.device("cpu")


def test_tied_matrices_are_one(target_directory: Path, target: TinyTarget) -> None:
    matrices = load_target_matrices(target_directory, DRAFTER, CPU)
    assert matrices.embedding is matrices.lm_head
    assert torch.equal(matrices.embedding, target.embedding)


def test_untied_and_sharded_matrices_are_found(tmp_path: Path) -> None:
    embedding, lm_head = torch.randn(2, DRAFTER.vocab_size, DRAFTER.hidden_size).bfloat16()
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": lm_head}, tmp_path / "b.safetensors")
    weight_map = {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    index = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    config = {
        "hidden_size": DRAFTER.hidden_size,
        "vocab_size": DRAFTER.vocab_size,
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    matrices = load_target_matrices(tmp_path, DRAFTER, CPU)
    assert torch.equal(matrices.embedding, embedding.float())
    assert torch.equal(matrices.lm_head, lm_head.float())


def test_another_target_is_refused(target_directory: Path) -> None:
    with pytest.raises(AdaSpecError, match="vocab_size"):
        load_target_matrices(target_directory, replace(DRAFTER, vocab_size=50), CPU)


def test_damaged_weights_are_named(target_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((target_directory / "config.json").read_bytes())
    with pytest.raises(AdaSpecError, match="cannot be read"):
        load_target_matrices(tmp_path, DRAFTER, CPU)
    content = (target_directory / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:100])
    with pytest.raises(AdaSpecError, match="cannot be read"):
        load_target_matrices(tmp_path, DRAFTER, CPU)


def test_both_teachers_name_the_targets_choice(
    matrices: TargetMatrices, requests: list[Request]
) -> None:
    rows = torch.arange(len(requests[0]))
    expected = requests[0].logits.argmax(-1)
    hidden = teacher_of(requests[0], "hidden", rows)
    assert isinstance(hidden, HiddenTeacher)
    assert torch.equal(matrices.teacher_tokens(hidden, chunk_rows=7), expected)
    assert torch.equal(matrices.teacher_tokens(teacher_of(requests[0], "top-k", rows)), expected)


@pytest.mark.parametrize("chunk_rows", [1, 7, 256])
def test_condensing_keeps_the_largest_logits(
    matrices: TargetMatrices, requests: list[Request], chunk_rows: int
) -> None:
    rows = torch.arange(len(requests[0]))
    states, expected = (teacher_of(requests[0], kind, rows) for kind in ("hidden", "top-k"))
    condensed = matrices.condense(states, 8, chunk_rows)
    assert torch.equal(condensed.token_ids, expected.token_ids)
    torch.testing.assert_close(condensed.logits, expected.logits)
    torch.testing.assert_close(condensed.logsumexp, expected.logsumexp)
    everything = matrices.condense(states, 1000, chunk_rows)
    assert everything.logits.shape == (len(rows), DRAFTER.vocab_size)
