"""Partings are found where they are, with the reference's own gap."""

from adaspec.load.equality import GreedyAnswer, Parting, find_partings


def answer(tokens: list[int], top: list[dict[int, float]] | None = None) -> GreedyAnswer:
    return GreedyAnswer(
        tokens=tuple(tokens), top=tuple(top or []), target_passes=0, cached_tokens=0
    )


def test_equal_answers_have_no_parting() -> None:
    assert find_partings([answer([1, 2])], [answer([1, 2])]) == []


def test_the_first_difference_is_listed_with_its_gap() -> None:
    reference = answer([1, 2, 3], [{1: -0.1}, {2: -0.6, 7: -0.7}, {3: -0.1}])
    (parting,) = find_partings([answer([9]), reference], [answer([9]), answer([1, 7, 8])])
    assert (parting.prompt, parting.position) == (1, 1)
    assert (parting.reference_token, parting.other_token) == (2, 7)
    assert parting.gap is not None
    assert abs(parting.gap - 0.1) < 1e-9


def test_a_truncated_answer_parts_at_its_end_without_a_gap() -> None:
    assert find_partings([answer([1, 2])], [answer([1])]) == [
        Parting(prompt=0, position=1, reference_token=2, other_token=None, gap=None)
    ]
