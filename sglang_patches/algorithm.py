"""The ADASPEC algorithm: its name on SGLang's command line, its start-up checks, its worker."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from adaspec.config import config_from_environment
from adaspec.drafters.checkpoint import check_drafter_for_target
from adaspec.errors import AdaSpecError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ALGORITHM = "ADASPEC"

# CUDA graphs are captured and draft slots reserved for this many requests unless the user says
# otherwise; stock DFLASH stops at 48.
DEFAULT_MAX_RUNNING_REQUESTS = 128


class AdaSpecAlgorithm(CustomSpecAlgo):
    """Answers SGLang's questions about ADASPEC: in everything but the decode step it is DFLASH."""

    def is_dflash(self) -> bool:
        """Use DFLASH's prefill capture, draft pool sizing and relay of draft state."""
        return True

    def is_dflash_family(self) -> bool:
        """Drafts a block from tapped target features."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The draft block runs in TARGET_VERIFY mode."""
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        """No reader of the shared buffers after the target's prefill, as in DFLASH."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """The worker advances grammars through the scheduler's barrier."""
        return True

    def handle_server_args(self, server_args: "ServerArgs") -> None:
        """Check the pair of models and fill in the sizes the scheduler plans with.

        ``server_args`` is SGLang's recorder of plugin writes, not the record itself.

        Raises:
            AdaSpecError: for anything that could not be served, before a model is loaded.
        """
        _refuse_unsupported(server_args)
        block_size = _check_drafter(server_args)
        config_from_environment().verify.width(block_size)
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = block_size
        if server_args.max_running_requests is None and server_args.device != "cpu":
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        """Width of the captured graphs: the block for the draft, the verify length for the target.

        ``num_draft_tokens`` is the block size (``speculative_num_draft_tokens``).
        """
        if is_draft_worker:
            return num_draft_tokens
        return config_from_environment().verify.width(num_draft_tokens)

    def __getattr__(self, name: str):
        """Answer questions that ``CustomSpecAlgo`` does not know as DFLASH would."""
        return getattr(SpeculativeAlgorithm.DFLASH, name)


def register_algorithm() -> None:
    """Make ``--speculative-algorithm ADASPEC`` known to this process."""

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=AdaSpecAlgorithm)
    def worker_class(server_args: "ServerArgs") -> type:
        from sglang_patches.worker.worker import AdaSpecWorker

        return AdaSpecWorker


def _refuse_unsupported(args: "ServerArgs") -> None:
    refusals = {
        "--pp-size": args.pp_size != 1,
        "--enable-dp-attention": args.enable_dp_attention,
        "--enable-lora": bool(args.enable_lora),
        "--speculative-draft-window-size": args.speculative_draft_window_size is not None,
        "--enable-deterministic-inference": args.enable_deterministic_inference,
        "--disaggregation-mode": args.disaggregation_mode != "null",
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
    config = check_drafter_for_target(_directory(drafter), _directory(target))
    requested = args.speculative_num_draft_tokens or args.speculative_dflash_block_size
    if requested not in (None, config.block_size):
        raise AdaSpecError(
            f"the drafter in {drafter} drafts blocks of {config.block_size} tokens, not "
            f"{requested}; to verify fewer, set verify.length in the AdaSpec configuration."
        )
    return config.block_size


def _directory(model: str) -> Path:
    """A local model directory; a hub name is downloaded (or found in the cache) first."""
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
