"""The ADASPEC algorithm: its name on SGLang's command line, its start-up checks, its worker."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from adaspec.config import config_from_environment
from adaspec.drafters.checkpoint import read_drafter_config
from sglang_patches.checks import check_server_args, model_directory

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

    def supports_ragged_verify(self) -> bool:
        """Chains of a step differ in length, unless the policy is to verify a fixed one."""
        return _is_ragged()

    def handle_server_args(self, server_args: "ServerArgs") -> None:
        """Fill in the sizes the scheduler plans with.

        ``server_args`` is SGLang's recorder of plugin writes, not the record itself; what it says
        was checked by `_check_first`.
        """
        drafter = model_directory(server_args.speculative_draft_model_path)
        block_size = read_drafter_config(drafter).block_size
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
        return _verify_width(num_draft_tokens)

    def __getattr__(self, name: str) -> Any:
        """Answer questions that ``CustomSpecAlgo`` does not know as DFLASH would."""
        return getattr(SpeculativeAlgorithm.DFLASH, name)


@functools.cache
def _verify_width(block_size: int) -> int:
    """Verify length in tokens; read once, since SGLang asks several times in every step."""
    return config_from_environment().verify.width(block_size)


@functools.cache
def _is_ragged() -> bool:
    return config_from_environment().verify.policy != "fixed"


def register_algorithm() -> None:
    """Make ``--speculative-algorithm ADASPEC`` known to this process."""

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=AdaSpecAlgorithm)
    def worker_class(server_args: "ServerArgs") -> type:
        from sglang_patches.worker.worker import AdaSpecWorker

        return AdaSpecWorker

    register_resolution_hook("handle_speculative_decoding")(_check_first)


def _check_first(server_args: "ServerArgs", previous: Callable[["ServerArgs"], None]) -> None:
    """Run AdaSpec's checks before SGLang's ``handle_speculative_decoding``.

    That step reads the drafter's config.json (``_resolve_speculative_algorithm_alias``) before it
    asks the algorithm anything, and ends in a traceback of transformers if there is none.
    """
    view = resolving_view(server_args)
    if (view.speculative_algorithm or "").upper() == ALGORITHM:
        check_server_args(view)
    previous(server_args)
