"""A whole offline run: prompts in, drafter directory out."""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from transformers import AutoTokenizer

from adaspec.drafters.checkpoint import save_drafter
from adaspec.drafters.origin import Expectation, Origin, mark_target, write_origin
from adaspec.errors import AdaSpecError
from adaspec.training.collect import collect
from adaspec.training.config import TrainConfig
from adaspec.training.evaluate import AcceptanceReport
from adaspec.training.initialise import drafter_config, new_drafter
from adaspec.training.journal import Journal
from adaspec.training.prompts import Prompt, load_prompts
from adaspec.training.target_model import load_target
from adaspec.training.trainer import Trainer, load_state

Progress = Callable[[str, float, str], None]


def run_training(
    target_directory: Path,
    prompt_files: Sequence[Path],
    output: Path,
    config: TrainConfig,
    device: torch.device,
    progress: Progress = lambda stage, share, text: None,
) -> AcceptanceReport:
    """Generate trajectories, train a drafter on them, and write it.

    ``output`` receives ``drafter/`` (what a server loads, with its origin), ``log.jsonl``,
    ``train.json`` (the configuration with all defaults), and, to go on after an interruption,
    ``checkpoint.pt`` and ``trajectories/``. Calling again with the same arguments goes on exactly
    where the last checkpoint was.

    Args:
        progress: called with the stage, the share of it that is done, and a short text.

    Returns:
        Acceptance on the held-out trajectories.

    Raises:
        AdaSpecError: if an input is wrong, or ``output`` belongs to another run.
    """
    prompts = load_prompts(prompt_files)
    output.mkdir(parents=True, exist_ok=True)
    _claim(output, target_directory, prompts, config)
    target = load_target(target_directory, device, _dtype(config, device))
    tokenizer = AutoTokenizer.from_pretrained(target_directory)
    # Made before the trajectories, which may take hours: a shape that does not fit is refused now.
    torch.manual_seed(config.seed)
    shape = drafter_config(config.drafter, target, tokenizer)
    drafter = new_drafter(config.drafter, shape, target)
    trajectories = collect(
        target,
        tokenizer,
        prompts,
        config.generate,
        output / "trajectories",
        progress=lambda done, total: progress("generate", done / total, f"{done}/{total} prompts"),
    )
    random.Random(config.seed).shuffle(trajectories)
    heldout = max(1, round(config.data.heldout_share * len(trajectories)))
    trainer = Trainer(
        config, drafter, target, trajectories[heldout:], {"heldout": trajectories[:heldout]}
    )
    checkpoint = output / "checkpoint.pt"
    if checkpoint.exists():
        trainer.restore(load_state(checkpoint))
    with Journal(output / "log.jsonl", trainer.step, config.tensorboard) as journal:
        reports = trainer.run(
            journal, checkpoint, lambda share, text: progress("train", share, text)
        )
    save_drafter(trainer.drafter, output / "drafter")
    origin = Origin(
        target=mark_target(target_directory),
        taps=shape.target_layer_ids,
        expected=_expectation(reports["heldout"], config),
    )
    write_origin(output / "drafter", origin)
    return reports["heldout"]


def _expectation(report: AcceptanceReport, config: TrainConfig) -> Expectation | None:
    """What a server may expect; None where nothing was held back, or answers were sampled, of
    which greedy decoding says little.
    """
    if report.passes == 0 or config.generate.temperature > 0:
        return None
    return Expectation(
        committed_per_pass=report.committed_per_pass,
        survival=report.survival,
        setting=f"greedy decoding, simulated on {report.responses} held-out responses",
    )


def _claim(output: Path, target: Path, prompts: list[Prompt], config: TrainConfig) -> None:
    """Record what a directory was made from, and refuse to mix runs in it."""
    inputs = {
        "target": hashlib.sha256((target / "config.json").read_bytes()).hexdigest()
        if (target / "config.json").is_file()
        else None,
        "prompts": hashlib.sha256(msgspec.json.encode(prompts)).hexdigest(),
        "config": msgspec.to_builtins(config),
    }
    encoded = msgspec.json.format(msgspec.json.encode(inputs), indent=2)
    path = output / "train.json"
    if path.exists() and path.read_bytes() != encoded:
        raise AdaSpecError(
            f"{output} holds a run with another target, other prompts or another configuration; "
            "choose another output directory or delete this one."
        )
    path.write_bytes(encoded)


def _dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.precision == "bfloat16" else torch.float32
