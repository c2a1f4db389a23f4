"""Trajectories for the bundled drafter: real prompts, then prompts the target writes itself."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from adaspec.training.collect import collect_turns
from adaspec.training.config import GenerateSection
from adaspec.training.decoding import decode_all
from adaspec.training.prompts import Prompt, load_prompts
from adaspec.training.target_model import TargetModel
from adaspec.training.trajectories import Trajectory, load_trajectories, save_trajectories

DEV_SETS = ("gsm8k", "humaneval", "mt_bench", "math500")
_PROMPT_TOKENS = 160  # of a self-written user turn
_ROUND = 12_288  # prompts answered between two looks at the clock
_SHARD_TOKENS = 6_000_000  # keeps a compressed shard well under 16 MB
_PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"


def generate(
    target: TargetModel,
    tokenizer: Any,
    config: GenerateSection,
    prompts: Path,
    out: Path,
    seconds: float,
) -> None:
    """Write `dev-*.npz`, `heldout.npz` and `train-*.npz` to ``out`` within about ``seconds``."""
    deadline = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    questions = load_prompts([prompts / "gsm8k.jsonl"])
    random.shuffle(questions)
    count = min(256, len(questions) // 10)
    heldout, questions = questions[:count], questions[count:]
    _answer_test_sets(target, tokenizer, config, prompts, out, heldout)

    written = write_prompts(
        target, tokenizer, config, prompts / "openings.jsonl", lambda: time.monotonic() > deadline
    )
    others = written + load_prompts([prompts / "code.jsonl"])
    random.shuffle(others)
    pool = questions + others
    found: list[Trajectory] = []
    for start in range(0, len(pool), _ROUND):
        if time.monotonic() > deadline:
            break
        found += collect_turns(
            target,
            tokenizer,
            pool[start : start + _ROUND],
            config,
            first_id=start,
            stop=lambda: time.monotonic() > deadline,
        )
        tokens = sum(t.response_length for t in found)
        print(f"  {len(found)} trajectories, {tokens / 1e6:.1f} M response tokens", flush=True)
    _save_shards(out, found)


def write_prompts(
    target: TargetModel,
    tokenizer: Any,
    config: GenerateSection,
    openings: Path,
    stop: Callable[[], bool],
) -> list[Prompt]:
    """Let the target complete user turns, one for each opening (Magpie, arXiv 2406.08464)."""
    rows = [json.loads(line)["opening"] for line in openings.open(encoding="utf-8")]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACEHOLDER}], tokenize=False, add_generation_prompt=False
    )
    head = text[: text.index(_PLACEHOLDER)]
    ids = [tokenizer(head + row, add_special_tokens=False).input_ids for row in rows]
    sampling = msgspec.structs.replace(
        config, temperature=0.9, max_new_tokens=_PROMPT_TOKENS, batch_rows=2 * config.batch_rows
    )
    found: dict[str, None] = {}

    def finish(index: int, response: list[int]) -> None:
        if len(response) == _PROMPT_TOKENS:
            return  # it did not come to an end
        turn = (rows[index] + tokenizer.decode(response, skip_special_tokens=True)).strip()
        if len(turn) >= 16:
            found[turn] = None

    decode_all(target, ids, sampling, finish, stop=stop)
    print(f"  {len(found)} prompts written by the target", flush=True)
    return [Prompt(prompt=turn) for turn in found]


def load(out: Path) -> tuple[list[Trajectory], list[Trajectory], dict[str, list[Trajectory]]]:
    """Training, held-out and dev trajectories."""
    train = load_trajectories(sorted(out.glob("train-*.npz")))
    dev = {name: load_trajectories([out / f"dev-{name}.npz"]) for name in DEV_SETS}
    return train, load_trajectories([out / "heldout.npz"]), dev


def _answer_test_sets(
    target: TargetModel,
    tokenizer: Any,
    config: GenerateSection,
    prompts: Path,
    out: Path,
    heldout: list[Prompt],
) -> None:
    """Answer the dev sets and the held-out questions in one go, so that waves are full."""
    sets = {f"dev-{name}": load_prompts([prompts / f"{name}_dev.jsonl"]) for name in DEV_SETS}
    sets["heldout"] = heldout
    everything = [prompt for part in sets.values() for prompt in part]
    found = collect_turns(target, tokenizer, everything, config)
    start = 0
    for name, part in sets.items():
        ids = range(start, start + len(part))
        save_trajectories(out / f"{name}.npz", [t for t in found if t.prompt_id in ids])
        start += len(part)


def _save_shards(out: Path, trajectories: list[Trajectory]) -> None:
    shard: list[Trajectory] = []
    number = size = 0
    for trajectory in trajectories:
        shard.append(trajectory)
        size += len(trajectory.tokens)
        if size >= _SHARD_TOKENS:
            save_trajectories(out / f"train-{number:02d}.npz", shard)
            shard, number, size = [], number + 1, 0
    if shard:
        save_trajectories(out / f"train-{number:02d}.npz", shard)
