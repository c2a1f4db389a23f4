"""Verification of chains of different lengths in CUDA graphs, on SGLang's Triton attention.

SGLang 0.5.23 captures ragged verification for the backends that say they support it
(``supports_ragged_verify_graph``): a graph for each total of rows, whose chain boundaries it
refreshes in place before every replay (``DecodeCudaGraphRunner._stage_ragged_verify_layout``). Its
Triton backend does not say so, because it lays out the rows of a verify pass by one width. Its
kernel takes any boundaries; they are given to it here.
"""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.layers.attention import triton_backend
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout

from adaspec.errors import AdaSpecError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

MODE_VARIABLE = "SGLANG_RAGGED_VERIFY_MODE"
_MODE = "compact"


class TritonAttnBackend(triton_backend.TritonAttnBackend):
    """The stock backend, with the boundaries of a ragged layout in place of equal ones.

    It keeps the name: ``resolve_dflash_verify_mask_policy`` goes by it.
    """

    supports_ragged_verify_graph = True

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """As upstream, for a pass without a graph."""
        super().init_forward_metadata(forward_batch)
        self._take_boundaries(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: "ForwardBatch", in_capture: bool = False
    ) -> None:
        """As upstream; a graph reads its boundaries from the layout it was captured with."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture:
            self._take_boundaries(forward_batch)

    def _take_boundaries(self, forward_batch: "ForwardBatch") -> None:
        layout = resolve_ragged_verify_layout(forward_batch)
        if layout is not None and forward_batch.forward_mode.is_target_verify():
            self.forward_metadata = replace(
                self.forward_metadata, qo_indptr=layout.qo_indptr_device
            )


def allow_ragged_passes(runner: "ModelRunner") -> None:
    """Let the target verify chains of different lengths; before its graphs are captured.

    Raises:
        AdaSpecError: if its attention backend is another than Triton, or SGLang was told to
            verify in another way.
    """
    backend = runner.attn_backend
    if type(backend) is not triton_backend.TritonAttnBackend:
        raise AdaSpecError(
            "verify lengths that differ between requests need SGLang's Triton attention on a GPU, "
            f"and this server attends with {type(backend).__name__}; add --attention-backend "
            'triton, or set verify.policy to "fixed".'
        )
    mode = os.environ.setdefault(MODE_VARIABLE, _MODE)
    if mode != _MODE:
        raise AdaSpecError(
            f"{MODE_VARIABLE} is {mode!r}, but verify lengths that differ between requests need "
            f'{_MODE!r}; unset it, or set verify.policy to "fixed".'
        )
    # The instance is bound to the pools already; what differs is only how it lays out a pass.
    backend.__class__ = TritonAttnBackend
