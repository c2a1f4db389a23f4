"""Rows of packed chains and the rectangle they stand for."""

import torch

from adaspec.chains import ChainRows

LENGTHS = [3, 1, 4, 2]


def ragged() -> ChainRows:
    return ChainRows.ragged(torch.tensor(LENGTHS), sum(LENGTHS), 4)


def test_every_row_knows_its_chain_and_column() -> None:
    rows = ragged()
    expected = [(chain, column) for chain, n in enumerate(LENGTHS) for column in range(n)]
    assert list(zip(rows.chain.tolist(), rows.column.tolist(), strict=True)) == expected
    assert rows.start.tolist() == [0, 3, 4, 8]
    verified = rows.is_verified
    assert verified is not None
    assert (verified.sum(1) + 1).tolist() == LENGTHS


def test_packing_undoes_expanding() -> None:
    for rows in (ragged(), ChainRows.uniform(4, 3, torch.device("cpu"))):
        values = torch.randn(rows.total, 2)
        assert torch.equal(rows.pack(rows.expand(values)), values)


def test_behind_the_end_of_a_chain_stands_its_last_row() -> None:
    values = torch.arange(sum(LENGTHS))
    assert ragged().expand(values).tolist() == [
        [0, 1, 2, 2],
        [3, 3, 3, 3],
        [4, 5, 6, 7],
        [8, 9, 9, 9],
    ]
    chosen = ragged().expand(values, torch.tensor([3, 0]))
    assert chosen.tolist() == [[8, 9, 9, 9], [0, 1, 2, 2]]


def test_padding_behind_the_rows_is_left_out() -> None:
    values = torch.arange(sum(LENGTHS) + 3)
    assert int(ragged().expand(values).max()) == sum(LENGTHS) - 1
    uniform = ChainRows.uniform(2, 4, torch.device("cpu"))
    assert uniform.expand(torch.arange(11)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_belongs_to_a_chain_is_repeated_for_its_rows() -> None:
    assert ragged().repeat(torch.tensor([7, 8, 9, 6])).tolist() == [7, 7, 7, 8, 9, 9, 9, 9, 6, 6]
