"""From prompts to trajectories: chat template, generation by the target, resumable shards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adaspec.errors import AdaSpecError
from adaspec.training.config import GenerateSection
from adaspec.training.decoding import decode_all
from adaspec.training.prompts import Prompt
from adaspec.training.target_model import TargetModel
from adaspec.training.trajectories import Trajectory, load_trajectories, save_trajectories

Conversation = list[dict[str, str]]
Progress = Callable[[int, int], None]


def render(tokenizer: Any, conversations: Sequence[Conversation]) -> list[list[int]]:
    """Token ids of conversations, ready for the assistant's next turn.

    Raises:
        AdaSpecError: if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise AdaSpecError(
            "the target's tokenizer has no chat template; use an instruction-tuned target."
        )
    if not conversations:
        return []
    texts = [
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        for talk in conversations
    ]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False).input_ids
    return ids


def collect_turns(
    target: TargetModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: GenerateSection,
    first_id: int = 0,
    progress: Progress = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Trajectory]:
    """Let the target answer prompts; a conversation gives one trajectory a turn.

    Prompts longer than ``max_prompt_tokens`` are left out.

    Args:
        first_id: number of the first prompt, for `Trajectory.prompt_id`.
        progress: called with answered and total prompts of the current turn.
        stop: when true, what is not decoded yet is left out.
    """
    talks: dict[int, Conversation] = {number: [] for number in range(len(prompts))}
    found: list[Trajectory] = []
    for turn in range(max((len(p.user_turns) for p in prompts), default=0)):
        talks = {
            number: [*talk, {"role": "user", "content": prompts[number].user_turns[turn]}]
            for number, talk in talks.items()
            if len(prompts[number].user_turns) > turn
        }
        rendered = zip(talks, render(tokenizer, list(talks.values())), strict=True)
        asked = [(number, ids) for number, ids in rendered if len(ids) <= config.max_prompt_tokens]
        answered: dict[int, list[int]] = {}

        def finish(
            index: int,
            response: list[int],
            asked: list[tuple[int, list[int]]] = asked,
            answered: dict[int, list[int]] = answered,
        ) -> None:
            number, ids = asked[index]
            answered[number] = response
            found.append(
                Trajectory(np.array(ids + response, np.int32), len(ids), first_id + number)
            )
            progress(len(answered), len(asked))

        decode_all(target, [ids for _, ids in asked], config, finish, stop=stop)
        talks = {
            number: [*talks[number], _assistant(tokenizer, response)]
            for number, response in answered.items()
            if len(prompts[number].user_turns) > turn + 1
        }
    return sorted(found, key=lambda t: (t.prompt_id, t.prompt_length))


def _assistant(tokenizer: Any, response: list[int]) -> dict[str, str]:
    return {"role": "assistant", "content": tokenizer.decode(response, skip_special_tokens=True)}


def collect(
    target: TargetModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: GenerateSection,
    directory: Path,
    shard_prompts: int = 1024,
    progress: Progress = lambda done, total: None,
) -> list[Trajectory]:
    """Trajectories of all prompts, kept as shards in ``directory``.

    A shard that is already there is not made again, so an interrupted run goes on where it stopped.
    Whoever calls makes sure that the shards belong to these prompts and settings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = []
    for start in range(0, len(prompts), shard_prompts):
        shard = directory / f"trajectories-{start // shard_prompts:05d}.npz"
        shards.append(shard)
        part = prompts[start : start + shard_prompts]
        if not shard.exists():

            def report(done: int, total: int, start: int = start) -> None:
                progress(start + done, len(prompts))

            save_trajectories(shard, collect_turns(target, tokenizer, part, config, start, report))
        progress(start + len(part), len(prompts))
    return load_trajectories(shards)
