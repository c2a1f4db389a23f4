"""`adaspec train`: make a drafter for a target."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    target: Annotated[Path, typer.Option(help="Target model directory (Hugging Face layout).")],
    prompts: Annotated[list[Path], typer.Option(help="JSON lines with `prompt` or `turns`.")],
    out: Annotated[Path, typer.Option(help="Output directory; an interrupted run goes on there.")],
    config: Annotated[Path | None, typer.Option(help="Training configuration (TOML).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Let the target answer prompts, and train a drafter on the answers."""
    # torch and transformers take seconds to import; `adaspec --help` should not.
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from adaspec.training.config import TrainConfig, load_train_config
    from adaspec.training.run import run_training

    settings = TrainConfig() if config is None else load_train_config(config)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {
            stage: bars.add_task(stage, total=1.0, text="", start=False)
            for stage in ("generate", "train")
        }

        def report(stage: str, share: float, text: str) -> None:
            bars.start_task(tasks[stage])
            bars.update(tasks[stage], completed=share, text=text)

        result = run_training(target, prompts, out, settings, torch.device(device), report)
    typer.echo(
        f"{out / 'drafter'}: {result.committed_per_pass:.2f} committed tokens per target pass on "
        f"{result.responses} held-out responses"
    )
