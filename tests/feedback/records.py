"""Small valid records for tests."""

import torch
from torch import Tensor

from adaspec.feedback import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    HiddenTeacher,
    Record,
    RollbackRecord,
    Teacher,
    TopKTeacher,
)

LINEAGE = "0123456789abcdef"


def context_record(
    request: str = "r", number: int = 0, start: int = 0, rows: int = 4, width: int = 6
) -> ContextRecord:
    return ContextRecord(
        LINEAGE,
        request,
        number,
        version=3,
        start=start,
        token_ids=torch.arange(start + rows, dtype=torch.int32),
        taps=torch.randn(rows, width).to(torch.bfloat16),
    )


def hidden_teacher(rows: int) -> HiddenTeacher:
    return HiddenTeacher(torch.randn(rows, 5).to(torch.float16))


def top_k_teacher(rows: int) -> TopKTeacher:
    return TopKTeacher(
        torch.randn(rows, 3),
        torch.randint(0, 50, (rows, 3), dtype=torch.int32),
        torch.randn(rows),
    )


def block_record(
    request: str = "r", number: int = 1, teacher: Teacher | None = None
) -> BlockRecord:
    """Two steps: 4 verified and 2 accepted, then 3 verified and 0 accepted."""
    return BlockRecord(
        LINEAGE,
        request,
        number,
        version=3,
        start=4,
        temperature=0.5,
        verify_lengths=(4, 3),
        accepted=(2, 0),
        token_ids=torch.tensor([10, 11, 12, 13, 14], dtype=torch.int32),
        drafts=torch.tensor([11, 12, 99, 98, 97], dtype=torch.int32),
        taps=torch.randn(4, 6),
        teacher=teacher or top_k_teacher(7),
        teacher_rows="verified",
    )


def all_kinds() -> list[Record]:
    return [
        context_record(),
        context_record(start=7),
        block_record(teacher=top_k_teacher(7)),
        block_record(teacher=hidden_teacher(7)),
        EndRecord(LINEAGE, "r", 2, 9, "finished"),
        RollbackRecord(LINEAGE, 4, 2, "acceptance fell from 2.9 to 2.1 tokens per pass"),
        RollbackRecord(LINEAGE, 5, 4, "its hash is wrong", "refusal"),
    ]


def same(left: object, right: object) -> bool:
    """Deep equality of records, bit for bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__
        )
    return left == right
