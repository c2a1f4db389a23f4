"""Server arguments the CPU platform fills in, so that ``--model-path`` alone is enough."""

import logging
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from adaspec.errors import AdaSpecError

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "torch_native"
"""Name of the platform's attention backend: SGLang's own name for attention in plain PyTorch."""

_IN_TREE_CPU_BACKEND = "intel_amx"  # what handle_cpu_backends picks before the platform is asked
_MEMORY_FRACTION = 0.5
_MAX_RUNNING_REQUESTS = 32
_KV_TOKENS_PER_REQUEST = 2048
_CHUNKED_PREFILL = 512


def apply(server_args: Any) -> None:
    """Fill in what the user left open; called through ``SRTPlatform.apply_server_args_defaults``.

    - ``dtype auto`` becomes float32, not the checkpoint's dtype: greedy speculative output equals
      plain output token by token only there (in bfloat16 the rounding depends on the batch shape),
      and a CPU without AMX multiplies bfloat16 no faster. ``--dtype bfloat16`` is honoured.
    - Memory: weights (target and drafter) and KV pools get half of what is available at start,
      the rest is for the other processes and a learner; upstream charges the drafter's weights and
      KV bytes per token against the same budget. Within it the KV pool stops at 2048 tokens per
      running request, because a CPU pool is touched when it is made.
    - 32 running requests; prefill in chunks of 512 tokens, which already saturates the cores and
      keeps a long prompt from stalling the requests that decode.
    - Idle server processes sleep; no graph capture; overlap scheduling stays on.

    Raises:
        AdaSpecError: an attention backend was named that this platform does not have.
    """
    _require_attention_backend(server_args)
    server_args.attention_backend = ATTENTION_BACKEND
    server_args.sampling_backend = "pytorch"
    if server_args.dtype == "auto":
        server_args.dtype = "float32"
        logger.info("CPU platform: dtype auto means float32; pass --dtype bfloat16 to change it.")
    if server_args.mem_fraction_static is None:
        server_args.mem_fraction_static = _MEMORY_FRACTION
    if server_args.max_running_requests is None:
        server_args.max_running_requests = _MAX_RUNNING_REQUESTS
    if server_args.max_total_tokens is None:
        server_args.max_total_tokens = _KV_TOKENS_PER_REQUEST * server_args.max_running_requests
    if server_args.chunked_prefill_size is None:
        server_args.chunked_prefill_size = _CHUNKED_PREFILL
    server_args.sleep_on_idle = True
    # One pool for full and sliding-window layers: the backend masks the window itself.
    server_args.disable_hybrid_swa_memory = True
    graphs = with_phase(server_args.cuda_graph_config, Phase.DECODE, backend=Backend.DISABLED)
    server_args.cuda_graph_config = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)


def _require_attention_backend(server_args: Any) -> None:
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    known = (None, ATTENTION_BACKEND, _IN_TREE_CPU_BACKEND)
    for field in fields:
        value = getattr(server_args, field)
        if value not in known:
            flag = "--" + field.replace("_", "-")
            raise AdaSpecError(
                f"{flag} {value} does not run on the CPU platform; leave it out or pass "
                f"{ATTENTION_BACKEND}."
            )
