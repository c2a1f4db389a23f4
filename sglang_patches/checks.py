"""What is checked before SGLang loads a model: its version, the flags, the drafter, the options."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from adaspec.config import config_from_environment
from adaspec.drafters.checkpoint import check_drafter_for_target
from adaspec.errors import AdaSpecError
from adaspec.plugins import load_factory
from sglang_patches.version import require_sglang_version

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def check_server_args(args: "ServerArgs") -> None:
    """Refuse what ADASPEC could not serve.

    Raises:
        AdaSpecError: naming the first flag, file, tensor or option that is wrong.
    """
    require_sglang_version()
    _refuse_unsupported(args)
    block_size = _check_drafter(args)
    verify = config_from_environment().verify
    verify.width(block_size)
    if verify.factory is not None:
        load_factory(verify.factory, "verify.factory")


def model_directory(model: str) -> Path:
    """A local model directory; a hub name is downloaded (or found in the cache) first.

    Raises:
        AdaSpecError: if the download fails.
    """
    path = Path(model).expanduser()
    looks_like_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~", os.sep))
    if path.is_dir() or not looks_like_hub_name:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model))
    except Exception as error:
        raise AdaSpecError(
            f"{model} is neither a directory nor a model that could be downloaded ({error})."
        ) from error


def _refuse_unsupported(args: "ServerArgs") -> None:
    refusals = {
        "--pp-size": args.pp_size != 1,
        "--enable-dp-attention": args.enable_dp_attention,
        "--enable-lora": bool(args.enable_lora),
        "--speculative-draft-window-size": args.speculative_draft_window_size is not None,
        "--enable-deterministic-inference": args.enable_deterministic_inference,
        "--disaggregation-mode": args.disaggregation_mode != "null",
        # The drafter's weights would be read before they are there.
        "--startup-weight-load-mode overlap": args.startup_weight_load_mode == "overlap",
        "--speculative-use-block-verification": args.speculative_use_block_verification,
    }
    for flag, is_set in refusals.items():
        if is_set:
            raise AdaSpecError(f"ADASPEC does not support {flag} yet; remove it, or use DFLASH.")


def _check_drafter(args: "ServerArgs") -> int:
    """Check the drafter against the target on disk; returns its block size."""
    if args.speculative_draft_model_path is None:
        raise AdaSpecError(
            "ADASPEC needs a drafter: give its directory with --speculative-draft-model-path."
        )
    drafter, target = args.speculative_draft_model_path, args.model_path
    config = check_drafter_for_target(model_directory(drafter), model_directory(target))
    taps = list(config.target_layer_ids)
    if taps != sorted(set(taps)):
        # ``layers_to_capture``: the target's layers append what they capture as they run.
        raise AdaSpecError(
            f"the drafter in {drafter} taps the target's layers {taps}, but SGLang delivers "
            "taps in the order of the layers, each once; train it with target_layer_ids "
            f"{sorted(set(taps))}."
        )
    requested = args.speculative_num_draft_tokens or args.speculative_dflash_block_size
    if requested not in (None, config.block_size):
        raise AdaSpecError(
            f"the drafter in {drafter} drafts blocks of {config.block_size} tokens, not "
            f"{requested}; to verify fewer, set verify.length in the AdaSpec configuration."
        )
    return config.block_size
