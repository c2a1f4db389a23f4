"""A target of 8B cost that speaks like SmolLM2, and a drafter of published size for it.

    python -m benchmarks.inflate OUT [--device cuda]

OUT/target and OUT/drafter can be served as they are. Acceptance is SmolLM2's and real; the cost of
a step is that of an 8B model, but for two things: the vocabulary stays SmolLM2's (49,152), and
``o_proj`` and ``down_proj`` are mostly zeros, which cost a GPU the same time but less power. Say so
wherever a figure from it is shown.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.target.smollm2 import ensure_smollm2
from benchmarks.inflate.fill import DFLASH_8B, LLAMA_8B
from benchmarks.inflate.models import inflate_drafter, inflate_target


def main(
    out: Annotated[Path, typer.Argument(help="Directory that does not exist yet.")],
    target: Annotated[Path | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    drafter: Annotated[Path, typer.Option(help="Drafter of that target.")] = BUNDLED_DRAFTER,
    device: Annotated[str, typer.Option(help="Where the matrices are made.")] = "cpu",
) -> None:
    """Write an inflated pair of target and drafter."""
    begun = time.monotonic()
    source, where = target or ensure_smollm2(progress=print), torch.device(device)
    inflate_target(source, out / "target", LLAMA_8B, device=where)
    inflate_drafter(
        drafter,
        out / "drafter",
        DFLASH_8B,
        target_layers=LLAMA_8B.num_hidden_layers,
        device=where,
    )
    print(f"written to {out} in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    typer.run(main)
