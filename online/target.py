"""The two matrices of the target that a drafter borrows, read without loading the target."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from adaspec.drafters.checkpoint import INDEX_NAME, WEIGHTS_NAME, check_pair, read_model_config
from adaspec.drafters.config import DrafterConfig
from adaspec.errors import AdaSpecError
from adaspec.feedback import HiddenTeacher, Teacher, TopKTeacher

_EMBEDDING = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TargetMatrices:
    """Input embedding and output matrix; one tensor if the target ties them.

    Attributes:
        embedding: ``[vocab, hidden]``.
        lm_head: ``[vocab, hidden]``.
    """

    embedding: Tensor
    lm_head: Tensor

    def teacher_tokens(self, teacher: Teacher, chunk_rows: int = 1024) -> Tensor:
        """The teacher's argmax of every row: int64 ``[rows]``, on the CPU."""
        if not isinstance(teacher, HiddenTeacher):
            best = teacher.logits.argmax(-1, keepdim=True)  # [rows, 1]
            return teacher.token_ids.gather(1, best).squeeze(1).long().cpu()
        chosen = [
            self._logits(rows).argmax(-1).cpu() for rows in torch.split(teacher.states, chunk_rows)
        ]
        return torch.cat(chosen)

    def condense(self, teacher: HiddenTeacher, top_k: int, chunk_rows: int = 256) -> TopKTeacher:
        """The largest logits that the states stand for, float32, on the CPU."""
        logits, token_ids, sums = [], [], []
        for rows in torch.split(teacher.states, chunk_rows):
            whole = self._logits(rows).float()  # [chunk, vocab]
            top = whole.topk(min(top_k, whole.shape[1]), dim=-1)
            logits.append(top.values.cpu())
            token_ids.append(top.indices.to("cpu", torch.int32))
            sums.append(whole.logsumexp(-1).cpu())
        return TopKTeacher(torch.cat(logits), torch.cat(token_ids), torch.cat(sums))

    def _logits(self, states: Tensor) -> Tensor:
        return F.linear(states.to(self.lm_head), self.lm_head)


def load_target_matrices(
    directory: Path,
    drafter: DrafterConfig,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> TargetMatrices:
    """Read the embedding and the output matrix of a target directory.

    The file is mapped into memory: on the CPU, in the file's own type, nothing is copied.

    Args:
        dtype: type of the matrices; by default float32 on the CPU and the file's on a GPU.

    Raises:
        AdaSpecError: if the directory does not fit the drafter or a matrix cannot be read.
    """
    config = read_model_config(directory, "target")
    check_pair(drafter, config)
    text = config.get("text_config", config)
    embedding = _read(directory, _EMBEDDING)
    if embedding is None:
        raise AdaSpecError(
            f"{directory} has no tensor that ends in {_EMBEDDING}; give the target's directory."
        )
    lm_head = None if text.get("tie_word_embeddings") else _read(directory, _LM_HEAD)
    shape = (drafter.vocab_size, drafter.hidden_size)
    for matrix in (embedding, lm_head):
        if matrix is not None and tuple(matrix.shape) != shape:
            raise AdaSpecError(
                f"a matrix of the target {directory} has shape {list(matrix.shape)} instead of "
                f"{list(shape)}; use the target this drafter was trained for."
            )
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    embedding = embedding.to(device, dtype)
    return TargetMatrices(embedding, embedding if lm_head is None else lm_head.to(device, dtype))


def _read(directory: Path, suffix: str) -> Tensor | None:
    """The tensor whose name ends in ``suffix``, or None."""
    try:
        for path in _weight_files(directory, suffix):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    if name == suffix or name.endswith(f".{suffix}"):
                        tensor: Tensor = file.get_tensor(name)
                        return tensor
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise AdaSpecError(
            f"the weights of the target {directory} cannot be read ({error}); restore the files."
        ) from error
    return None


def _weight_files(directory: Path, suffix: str) -> list[Path]:
    index = directory / INDEX_NAME
    if not index.exists():
        return [directory / WEIGHTS_NAME]
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return sorted({directory / shard for name, shard in shards.items() if name.endswith(suffix)})
