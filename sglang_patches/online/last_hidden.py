"""The target's last hidden states: what the learner's copy of the ``lm_head`` makes logits of."""

from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import nn

from adaspec.errors import AdaSpecError


def keep_last_hidden_states(target: nn.Module) -> None:
    """Let every verify pass return the input of its ``lm_head`` as ``last_hidden_states``.

    SGLang has the means (upstream: ``LogitsProcessor.keep_last_hidden_states``, made for
    ``--enable-return-aux-hidden-states``), and its CUDA graphs, padding and parallelism take part.
    Call it before graphs are captured: each graph then keeps states of its own, ``verify length ·
    hidden · element size`` bytes for every request of its batch size.

    Raises:
        AdaSpecError: if the target's logits are more than the states times the ``lm_head``.
    """
    processors = [module for module in target.modules() if isinstance(module, LogitsProcessor)]
    name = type(target).__name__
    if len(processors) != 1:
        raise AdaSpecError(
            f'tap.teacher is "hidden", but {name} has {len(processors)} logits processors where '
            'one is needed; set it to "top-k".'
        )
    (processor,) = processors
    if processor.logit_scale is not None or processor.final_logit_softcapping:
        raise AdaSpecError(
            f'tap.teacher is "hidden", but {name} scales or caps its logits, which the learner '
            'would not; set it to "top-k".'
        )
    processor.keep_last_hidden_states = True
