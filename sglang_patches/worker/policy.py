"""The policy of the verify length on this server: what it may choose, and what it can read."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from adaspec.config import VerifyConfig
from adaspec.drafters.checkpoint import read_drafter_config, read_tensors
from adaspec.drafters.heads import LengthHead
from adaspec.errors import AdaSpecError
from adaspec.verify import VerifyShapes
from sglang_patches.online.weights import HEAD_PREFIX
from sglang_patches.worker.graphs import RaggedGraphs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_patches.worker.worker import AdaSpecWorker


# What keeps a policy from deciding alike on every rank of tensor parallelism.
_ONE_RANK_ONLY = {
    "goodput": "decides by the clock of one process",
    "custom": "is not known to decide alike in every process",
}


def check_policy(
    config: VerifyConfig, drafter: Path, server_args: "ServerArgs", *, ranks: int
) -> None:
    """Refuse a policy that this server or this drafter cannot follow.

    Args:
        ranks: of tensor parallelism.

    Raises:
        AdaSpecError: naming the policy and what it lacks.
    """
    name = config.policy
    if name == "adaflash":
        drafter_config = read_drafter_config(drafter)
        if drafter_config.length_head_width is None or not drafter_config.length_head_is_direct:
            raise AdaSpecError(
                f'the policy "adaflash" needs a drafter with a length head, which {drafter} has '
                'not; use a drafter trained with one, or set verify.policy to "goodput".'
            )
    unfit = {
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        "--disable-cuda-graph-padding": server_args.disable_cuda_graph_padding,
    }
    for flag, is_set in unfit.items():
        if name != "fixed" and is_set:
            raise AdaSpecError(
                f'the policy "{name}" verifies different lengths in one step, which SGLang does '
                f'not support with {flag}; leave that out, or set verify.policy to "fixed".'
            )
    if name in _ONE_RANK_ONLY and ranks > 1:
        raise AdaSpecError(
            f'the policy "{name}" {_ONE_RANK_ONLY[name]}, so it does not support --tp-size above '
            '1 yet; leave that out, or set verify.policy to "fixed" or "ema".'
        )


def ragged_graphs(worker: "AdaSpecWorker") -> RaggedGraphs:
    """The graphs of ragged passes that SGLang has captured for the target, if any."""
    runner = worker.model_runner.decode_cuda_graph_runner
    tiers = getattr(runner, "capture_num_tokens", None)
    if not tiers:
        return RaggedGraphs(worker.block_size)
    return RaggedGraphs(worker.block_size, tuple(tiers), runner.max_bs)


def verify_shapes(worker: "AdaSpecWorker") -> VerifyShapes:
    """The verify steps that this server can run."""
    on_cpu = torch.device(worker.device).type == "cpu"
    ragged = on_cpu or worker.is_ragged
    return VerifyShapes(
        block_size=worker.block_size,
        max_batch=worker.model_runner.max_running_requests,
        ragged=ragged,
        on_host=on_cpu,
        # Graphs of uniform steps are captured for one length.
        widths=() if ragged else (worker.config.verify.width(worker.block_size),),
        token_tiers=worker.graphs.tiers,
        batch_tiers=worker.graphs.tiers,
        # On a GPU the draft graph reads every draft.
        draft_cost=_head_share(worker.model_runner.model) if on_cpu else 0.0,
    )


def _head_share(model: torch.nn.Module) -> float:
    """Share of the head in the parameters that a token of the target is multiplied by."""
    head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
    sizes = [weight.numel() for weight in model.parameters()]
    multiplied = sum(sizes)  # a tied weight counts once
    if head is not embedding:
        multiplied -= embedding.numel()
    return float(head.numel() / multiplied)


def load_length_head(drafter: Path, device: torch.device) -> LengthHead | None:
    """AdaFlash's head of the drafter in float32, or None if it has none.

    SGLang's draft model ignores it (``models/dflash.py``).
    """
    config = read_drafter_config(drafter)
    if config.length_head_width is None:
        return None
    head = LengthHead(config.hidden_size, config.length_head_width)
    tensors = read_tensors(drafter)
    head.load_state_dict(
        {
            name.removeprefix(HEAD_PREFIX): t
            for name, t in tensors.items()
            if name.startswith(HEAD_PREFIX)
        }
    )
    return head.to(device, torch.float32).eval()
