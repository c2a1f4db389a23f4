"""Prompt files, conversations and resumable shards."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaspec.errors import AdaSpecError
from adaspec.training.collect import collect, collect_turns, render
from adaspec.training.config import GenerateSection
from adaspec.training.prompts import Prompt, load_prompts
from adaspec.training.target_model import TargetModel
from adaspec.training.trajectories import Trajectory, load_trajectories, save_trajectories

SETTINGS = GenerateSection(max_new_tokens=6, batch_rows=4, cache_tokens=2048)


def equal(first: list[Trajectory], second: list[Trajectory]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(a.tokens, b.tokens)
        and (a.prompt_length, a.prompt_id) == (b.prompt_length, b.prompt_id)
        for a, b in zip(first, second, strict=True)
    )


def test_prompt_files_hold_prompts_or_turns(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "answer": 3}\n\n{"prompt": "b", "turns": ["b", "c"]}\n')
    assert [p.user_turns for p in load_prompts([path, path])] == [("a",), ("b", "c")] * 2


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": 3}', '{"prompt": " "}', '{"turns": [""]}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(AdaSpecError, match=r"prompts\.jsonl:2 "):
        load_prompts([path])


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match="cannot be read"):
        load_prompts([tmp_path / "nowhere.jsonl"])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(AdaSpecError, match="no prompts"):
        load_prompts([tmp_path / "empty.jsonl"])


def test_a_conversation_gives_a_trajectory_a_turn(target: TargetModel, tokenizer: Any) -> None:
    prompts = [Prompt(prompt="one"), Prompt(turns=("first", "second"))]
    single, opening, reply = collect_turns(target, tokenizer, prompts, SETTINGS, first_id=5)
    assert [t.prompt_id for t in (single, opening, reply)] == [5, 6, 6]
    assert {t.response_length for t in (single, opening, reply)} == {6}
    answer = tokenizer.decode(opening.tokens[opening.prompt_length :], skip_special_tokens=True)
    talk = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "second"},
    ]
    assert reply.tokens[: reply.prompt_length].tolist() == render(tokenizer, [talk])[0]


def test_long_prompts_are_left_out(target: TargetModel, tokenizer: Any) -> None:
    prompts = [Prompt(prompt="x" * 500), Prompt(prompt="short")]
    settings = GenerateSection(max_new_tokens=3, max_prompt_tokens=100)
    assert [t.prompt_id for t in collect_turns(target, tokenizer, prompts, settings)] == [1]


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer: Any) -> None:
    class Plain:
        chat_template = None

    with pytest.raises(AdaSpecError, match="chat template"):
        render(Plain(), [])


def test_shards_that_exist_are_not_made_again(
    target: TargetModel, tokenizer: Any, tmp_path: Path
) -> None:
    prompts = [Prompt(prompt=f"number {i}") for i in range(5)]
    done: list[int] = []

    def run() -> list[Trajectory]:
        return collect(
            target, tokenizer, prompts, SETTINGS, tmp_path, shard_prompts=2,
            progress=lambda count, total: done.append(count),
        )  # fmt: skip

    first = run()
    assert [t.prompt_id for t in first] == list(range(5))
    shards = sorted(tmp_path.iterdir())
    assert len(shards) == 3
    stamps = [shard.stat().st_mtime_ns for shard in shards]
    shards[1].unlink()
    assert equal(run(), first)
    again = [shard.stat().st_mtime_ns for shard in shards]
    assert [a == b for a, b in zip(stamps, again, strict=True)] == [True, False, True]
    assert done[-1] == 5


@pytest.mark.parametrize("largest", [300, 100_000])
def test_shards_keep_every_token(tmp_path: Path, largest: int) -> None:
    random = np.random.default_rng(0)
    some = [
        Trajectory(random.integers(0, largest, n).astype(np.int32), n // 2, i)
        for i, n in enumerate((4, 9, 2))
    ]
    save_trajectories(tmp_path / "a.npz", some)
    assert equal(load_trajectories([tmp_path / "a.npz"]), some)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz"]


def test_an_empty_shard_is_empty(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "a.npz", [])
    assert load_trajectories([tmp_path / "a.npz"]) == []


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save_trajectories(path, [Trajectory(np.arange(9, dtype=np.int32), 3, 0)])
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(AdaSpecError, match=r"a\.npz is not a trajectory shard"):
        load_trajectories([path])
