"""Make a recording without a server: the target decodes the prompts in large batches.

    python -m benchmarks.drift.decode --out DIR --drafter DIR --target DIR maths=gsm8k.jsonl:96 ...

The trajectories are those of greedy requests, except that no blocks were drafted on them: a learner
sees random anchors only. `record.py` records a live server, drafted blocks included.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from adaspec.drafters.checkpoint import read_drafter_config
from adaspec.feedback import TopKTeacher
from adaspec.load.prompts import load_prompts
from adaspec.training import trajectories as decoded
from adaspec.training.collect import collect_turns
from adaspec.training.config import GenerateSection
from adaspec.training.prompts import Prompt
from adaspec.training.target_model import TargetModel, load_target
from benchmarks.drift.recording import save_trajectory
from online.trajectory import Trajectory

_TOP_K = 64


def read(
    target: TargetModel, layers: tuple[int, ...], sequence: decoded.Trajectory, request: str
) -> Trajectory:
    """The target's taps and predictions along a decoded sequence."""
    tokens = torch.from_numpy(sequence.tokens).long()
    taps, final = target.read(tokens[None].to(target.device), layers)
    logits = target.logits(final[0, sequence.prompt_length :])
    top = logits.topk(_TOP_K, dim=-1)
    teacher = TopKTeacher(top.values, top.indices.int(), logits.logsumexp(-1))
    return Trajectory(
        request=request,
        tokens=tokens,
        taps=taps[0].to("cpu", torch.bfloat16),
        prompt_length=sequence.prompt_length,
        teacher=teacher.to(torch.device("cpu")),
        teacher_tokens=top.indices[:, 0].cpu(),
        blocks=(),
        temperature=0.0,
    )


def main() -> None:
    """Parse the options, decode and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phases", nargs="+", metavar="NAME=PROMPTS[:COUNT]")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64, help="sequences decoded together")
    options = parser.parse_args()
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    target = load_target(options.target, torch.device(options.device), dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    layers = read_drafter_config(options.drafter).target_layer_ids
    settings = GenerateSection(max_new_tokens=options.max_tokens, batch_rows=options.rows)
    for number, phase in enumerate(options.phases):
        name, _, source = phase.partition("=")
        path, _, count = source.partition(":")
        prompts = load_prompts(Path(path))[: int(count) if count else None]
        directory = options.out / f"{number}-{name}"
        directory.mkdir(parents=True)
        started = time.perf_counter()
        found = collect_turns(target, tokenizer, [Prompt(text) for text in prompts], settings)
        for index, sequence in enumerate(found):
            trajectory = read(target, layers, sequence, f"{name}-{index}")
            save_trajectory(directory / f"{index:06d}.safetensors", trajectory)
        print(f"{name}: {len(found)} requests in {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
