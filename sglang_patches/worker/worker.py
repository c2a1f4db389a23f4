"""The ADASPEC worker: SGLang's DFLASH worker with a decode step of our own.

Prefill, memory pools, CUDA graphs, the draft model runner and the draft KV writes are upstream's
(``DFlashWorkerV2``). The decode step is ours because upstream's verifies the whole block, ignores
penalties inside it, and offers no place to observe a verdict.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils import is_cuda

from adaspec.acceptance import accept_sampled
from adaspec.chains import ChainRows
from adaspec.config import VerifyConfig, config_from_environment
from adaspec.errors import AdaSpecError
from adaspec.verify import GoodputPolicy, VerifyPolicy, VerifyShapes, make_policy
from sglang_patches.checks import model_directory
from sglang_patches.online.start import start_online
from sglang_patches.worker.accept import Verdict, greedy_verdict, make_verdict, sampling_rules
from sglang_patches.worker.context import DraftContext
from sglang_patches.worker.draft import BlockWindow, open_window, propose
from sglang_patches.worker.draft_sampler import ConfidentDraftSampler, most_probable
from sglang_patches.worker.graphs import PackedChains
from sglang_patches.worker.history import OutputHistory
from sglang_patches.worker.lengths import PlannedStep, VerifyLengths, chain_rows
from sglang_patches.worker.policy import (
    check_policy,
    load_length_head,
    ragged_graphs,
    verify_shapes,
)
from sglang_patches.worker.probe import probe
from sglang_patches.worker.report import report
from sglang_patches.worker.verify import constrain_logits, pack_chains, target_forward

if TYPE_CHECKING:
    from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
    from sglang.srt.speculative.dflash_worker_v2 import _DflashDraftSampler


logger = logging.getLogger(__name__)

# Tokens per request whose context can be written without being seen in the time of a step.
_LITTLE_TO_CATCH_UP = 4


class AdaSpecWorker(DFlashWorkerV2):
    """Draft a block, verify as much of it as the policy says, commit what the target accepts."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ):
        self.config = config_from_environment()
        drafter = model_directory(server_args.speculative_draft_model_path)
        self.uses_triton = is_cuda()
        ranks = get_parallel().tp_group.world_size
        check_policy(self.config.verify, drafter, server_args, ranks=ranks)
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.length_head = load_length_head(drafter, torch.device(self.device))
        self.context = DraftContext(
            self._append_target_hidden_to_draft_kv_by_loc, on_host=not self.uses_triton
        )
        self.history = OutputHistory(self.model_runner.model_config.vocab_size, self.device)
        self.online = start_online(self, self.config)

    def make_policy(
        self, config: VerifyConfig, shapes: VerifyShapes, device: torch.device
    ) -> VerifyPolicy:
        """The policy of the verify length; tests put their own here."""
        return make_policy(config, shapes, device, has_confidence=self.knows_confidence)

    @property
    def knows_confidence(self) -> bool:
        """Whether `greedy_drafts` sees all of the vocabulary at once."""
        return bool(get_parallel().tp_group.world_size == 1)

    def init_attention_backends(self) -> None:
        """As upstream, and let the target's graphs, which come next, take ragged passes.

        Raises:
            AdaSpecError: for hybrid (Mamba, GDN, …) targets, whose state cannot be rolled back by a
                KV length; for attention that cannot verify chains of different lengths.
        """
        super().init_attention_backends()
        if self.is_ragged:
            from sglang_patches.worker.ragged_triton import allow_ragged_passes

            allow_ragged_passes(self.model_runner)
        if self._need_mamba_verify_commit:
            raise AdaSpecError(
                "ADASPEC does not support targets with recurrent layers (Mamba, GDN) yet: rejected "
                "drafts would stay in their state; use --speculative-algorithm DFLASH."
            )

    def init_cuda_graphs(self) -> None:
        """As upstream, between making the policy, whose needs the draft graphs serve, and measuring
        steps for it, when all is ready to run.

        Raises:
            AdaSpecError: if the policy's settings do not fit.
        """
        self.graphs = ragged_graphs(self)
        shapes, device = verify_shapes(self), torch.device(self.device)
        policy = self.make_policy(self.config.verify, shapes, device)
        self.lengths = VerifyLengths(policy, shapes, device)
        super().init_cuda_graphs()
        if self.uses_triton:
            from sglang_patches.worker.chain_kernels import warm_up

            warm_up(shapes.max_batch, shapes.block_size, device)
        if isinstance(self.lengths.policy, GoodputPolicy):
            self.seed(self.lengths.policy)

    def seed(self, policy: GoodputPolicy) -> None:
        """Measure steps for a policy that decides by their times."""
        seconds = self.config.verify.goodput.probe_seconds
        if seconds > 0:
            samples = probe(self, policy.probe_steps(), seconds)
            policy.cost.seed(samples)
            logger.info("measured %d kinds of steps for the verify length", len(samples))

    @property
    def is_ragged(self) -> bool:
        """Whether all passes go through graphs of chains that may differ in length."""
        return self.uses_triton and self.config.verify.policy != "fixed"

    @property
    def noise_embed_scale(self) -> float:
        """Factor on the embeddings of a draft block (Gemma-like targets; 1 for most)."""
        return float(self._noise_embed_scale)

    @property
    def mask_token_id(self) -> int:
        """Id of the token that fills the positions to be drafted."""
        return int(self._mask_token_id)

    @property
    def draft_sampler(self) -> "ConfidentDraftSampler | _DflashDraftSampler | None":
        """Upstream's argmax inside the draft CUDA graph, or None when drafting is eager."""
        return self._draft_sampler

    def _maybe_build_draft_sampler(self) -> "ConfidentDraftSampler | _DflashDraftSampler | None":
        """Upstream's, or one that keeps log-probabilities if the policy reads them."""
        sampler = super()._maybe_build_draft_sampler()
        if sampler is None or not self.lengths.policy.reads_log_probs or not self.knows_confidence:
            return sampler
        return ConfidentDraftSampler(sampler)

    @property
    def draft_block_spec_info(self) -> DFlashVerifyInput:
        """The attention description of a draft block (non-causal inside, ``block_size`` wide)."""
        return self._draft_block_spec_info

    @property
    def fused_kv_helper(self) -> "FusedKVMaterializeHelper | None":
        """Upstream's fused K/V projection, which holds copies of weights, or None."""
        return self._fused_kv_helper

    def greedy_drafts(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Argmax of the target's lm_head over draft hidden states ``[rows, hidden]``.

        Returns:
            Tokens int64 ``[rows]``, and their log-probabilities float32 ``[rows]``, or None if the
            policy does not read them.
        """
        lm_head = unwrap_lora_layer(self.model_runner.model.lm_head)
        method = getattr(lm_head, "quant_method", None)
        if get_parallel().tp_group.world_size > 1:
            tokens = self._greedy_sample_from_vocab_parallel_head(
                hidden_states=hidden, lm_head=lm_head
            )
            return tokens, None
        if should_apply_lm_head_quant_method(lm_head, method):
            logits = method.apply(lm_head, hidden, None)  # [rows, vocab, padded]
        else:
            logits = torch.nn.functional.linear(hidden.to(lm_head.weight.dtype), lm_head.weight)
        logits = logits[:, : lm_head.org_vocab_size]
        if not self.lengths.policy.reads_log_probs:
            return logits.argmax(dim=-1), None
        return most_probable(logits)

    def length_ratio(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The length head's output ``[batch]`` for draft blocks ``[batch, block, hidden]``.

        None if the drafter has no such head, or the policy does not read it.
        """
        if self.length_head is None or not self.lengths.policy.reads_length_ratio:
            return None
        with torch.inference_mode():
            return self.length_head(hidden.float())

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: "PPProxyTensors | None" = None,
    ) -> GenerationBatchResult:
        """Run one scheduler batch: upstream's prefill, or one speculative decode step."""
        self.lengths.start_step()
        if self.online is not None and self.online.before_step():
            self.lengths.policy.drafter_changed()
        is_prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if is_prefill or batch.forward_mode.is_idle():
            self.lengths.interrupt()
            self.context.catch_up()
            result = super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
            if is_prefill:
                self.history.observe_prefill(batch.reqs, result.next_token_ids)
                _spare_the_relay(batch, result.next_draft_input)
                result.logits_output.last_hidden_states = None  # of use in a verify pass only
                if self.online is not None:
                    self.online.after_prefill(batch)
            return result
        return self._decode(batch, on_publish, grammar_barrier)

    def _decode(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        draft_input = batch.spec_info
        if not isinstance(draft_input, DFlashDraftInputV2):
            raise RuntimeError(
                f"the running batch carries {type(draft_input).__name__} instead of the draft "
                "state of its prefill; AdaSpec needs SGLang 0.5.23's V2 scheduling."
            )
        if batch.seq_lens.is_cuda:
            # Produced by the previous step, possibly on another stream.
            batch.seq_lens.record_stream(torch.cuda.current_stream())

        step = self.lengths.plan(batch)
        if self.online is not None:
            self.online.after_plan(step.plan, self.lengths.policy)
        if step.plan.drafted:
            caught_up = self.context.catch_up()
            step.is_typical = caught_up <= _LITTLE_TO_CATCH_UP * len(batch.reqs)
            window = open_window(self, batch, draft_input, self.block_size)
            proposal = propose(self, batch, draft_input, window, step.plan.drafts)
            allocation = self.lengths.allocate(step, proposal.signals)
            rows = chain_rows(allocation, self.lengths.shapes)
            tokens = proposal.tokens[:, : rows.width]
        else:
            self.context.before_plain_step(step.plan.load.requests)
            window = open_window(self, batch, draft_input, 1)
            rows = ChainRows.uniform(len(batch.reqs), 1, window.ids.device)
            tokens = window.ids[:, :1]
        # Starts a copy to the host, so it must precede the launch it is hidden behind.
        grammar_tree = GrammarTree.from_linear_chain(tokens) if batch.has_grammar else None

        packed = pack_chains(self, window, tokens, rows)
        target = target_forward(self, batch, draft_input, window, packed, rows)
        verdict = self._judge(
            batch, target.logits_output, tokens, rows, grammar_tree, grammar_barrier
        )
        self.history.observe_commit(batch.reqs, verdict.committed, verdict.commit_lens)
        tapped = target.logits_output.hidden_states
        if self.online is not None:
            self.online.after_verify(batch.reqs, window.prefix_lens, tokens, rows, tapped, verdict)
        new_seq_lens = window.prefix_lens + verdict.commit_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        report(batch, draft_input, target.logits_output, verdict, rows)
        self._extend_draft_context(step, window, packed, rows, tapped, verdict)
        # [rows, taps · hidden] and [rows, hidden]; never copied to the host
        target.logits_output.hidden_states = target.logits_output.last_hidden_states = None
        next_draft_input = self._make_next_draft_input_decode(
            bonus_tokens=verdict.bonus, new_seq_lens=new_seq_lens
        )
        _spare_the_relay(batch, next_draft_input)
        return GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=verdict.committed.reshape(-1),
            accept_lens=verdict.commit_lens,
            can_run_cuda_graph=target.can_run_cuda_graph,
            next_draft_input=next_draft_input,
            speculative_num_draft_tokens=rows.width,
            new_seq_lens=new_seq_lens,
            routed_experts_output=target.routed_experts_output,
            indexer_topk_output=target.indexer_topk_output,
        )

    def _judge(
        self,
        batch: ScheduleBatch,
        logits_output: "LogitsProcessorOutput",
        tokens: torch.Tensor,
        rows: ChainRows,
        grammar_tree: GrammarTree | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> Verdict:
        """Turn target logits into a verdict that every tensor-parallel rank shares."""
        processor = self._target_logits_processor
        logits = logits_output.next_token_logits
        if processor is not None and processor.is_deferred_shard(logits):
            logits = logits_output.next_token_logits = processor.finish_deferred_gather(logits)
        if self.online is not None:
            self.online.before_constraints(batch.reqs, logits_output, rows)
        constrain_logits(self, batch, logits, tokens, rows, grammar_tree, grammar_barrier)
        info = batch.sampling_info
        if info is None or info.is_all_greedy:
            argmax = logits.argmax(dim=-1)
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, argmax)
            return greedy_verdict(tokens, argmax, rows)
        rules = sampling_rules(info, batch.reqs)
        acceptance = accept_sampled(tokens[:, 1:], logits, rules, rows)
        for decision in acceptance:
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, decision)
        return make_verdict(tokens, acceptance)

    def _extend_draft_context(
        self,
        step: PlannedStep,
        window: BlockWindow,
        packed: PackedChains,
        rows: ChainRows,
        tapped: torch.Tensor,
        verdict: Verdict,
    ) -> None:
        """Write the committed tokens' context K/V into the draft cache, or keep it for later.

        ``tapped`` is ``[rows, taps · hidden]``: the target features of the verified tokens.
        """
        if not step.plan.drafted:
            slots = self._draft_write_ids(window.kv_plan)
            self.context.keep(step.plan.load.requests, tapped, slots, window.positions[:, 0])
            return
        if packed.kv_plan is None or rows.lengths is None:
            slots = self._draft_write_ids(window.kv_plan).view(window.slots.shape)
        else:
            slots = self._draft_write_ids(packed.kv_plan)
        self.context.commit(rows, tapped, slots, packed.positions, verdict.commit_lens)

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        *,
        target_hidden: torch.Tensor,
        extend_lens: torch.Tensor | None = None,
        **places: torch.Tensor | None,
    ) -> None:
        """Show the online loop a prefill's target features, which upstream drops after this."""
        super()._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=target_hidden, extend_lens=extend_lens, **places
        )
        if self.online is not None and extend_lens is not None:
            self.online.see_prefill_taps(target_hidden)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Called by the scheduler when the accepted drafts of a decode step are on the host."""
        step = self.lengths.count(num_correct_drafts_per_req)
        if self.online is not None and step is not None:
            self.online.after_counts(
                num_correct_drafts_per_req, step.host_lengths(), step.plan.drafted
            )

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Called by the scheduler when a request has finished."""
        if self.online is not None:
            self.online.after_finish(rid)


def _spare_the_relay(batch: ScheduleBatch, draft_input: DFlashDraftInputV2) -> None:
    """Keep SGLang from relaying an empty tensor between steps.

    ``FutureMap`` scatters and gathers the draft state's hidden states unless the algorithm's name
    is DFLASH or DSPARK (``spec_need_hidden_states``); ours, like DFLASH's, are ``[batch, 0]``.
    Without overlap scheduling there is no relay, and ``merge_batch`` needs the tensor.
    """
    if batch.enable_overlap:
        draft_input.hidden_states = None
