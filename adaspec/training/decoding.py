"""Batched decoding of many prompts by the target, built for throughput rather than latency.

Prompts are decoded in waves of similar length over one static key-value cache; finished rows are
dropped at segment ends. On a GPU the steps of a segment replay a CUDA graph.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import Cache

from adaspec.training.config import GenerateSection
from adaspec.training.target_model import TargetModel

SEGMENT_STEPS = 128
_DONE_CHECK_STEPS = 16
_PREFILL_TOKENS = 65_536


class _WaveCache(Cache):  # type: ignore[misc]
    """Keys and values ``[rows, kv_heads, capacity, dim]`` of every layer; rows share their slot."""

    def __init__(self, target: TargetModel, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        config = target.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (rows, config.num_key_value_heads, capacity, dim)
        # Zeros, not empty: a slot that is masked still meets a zero weight, and 0 * NaN is NaN.
        layers = range(config.num_hidden_layers)
        self.keys = [target.embedding.new_zeros(shape) for _ in layers]
        self.values = [target.embedding.new_zeros(shape) for _ in layers]
        self.rows = slice(0, rows)
        self.slot = torch.zeros(1, dtype=torch.long, device=target.device)
        self.visible = capacity

    def update(  # type: ignore[no-untyped-def]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Store, and return what attention reads: the prompt itself, or the visible cache."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        length = key_states.shape[2]
        if length > 1:
            keys[self.rows, :, :length] = key_states
            values[self.rows, :, :length] = value_states
            return key_states, value_states
        keys.index_copy_(2, self.slot, key_states)
        values.index_copy_(2, self.slot, value_states)
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        for layer in range(len(self.keys)):
            self.keys[layer] = self.keys[layer].index_select(0, rows)
            self.values[layer] = self.values[layer].index_select(0, rows)


class _Wave:
    """Decoding state of one wave; every tensor is updated in place so that a graph can replay."""

    def __init__(
        self, target: TargetModel, prompts: Sequence[Sequence[int]], config: GenerateSection
    ) -> None:
        self.target, self.config = target, config
        device, rows = target.device, len(prompts)
        # At least two, because a one-token prompt would look like a decoding step to the cache.
        self.width = max(2, *map(len, prompts))
        self.capacity = _round_up(self.width + config.max_new_tokens, 64)
        self.cache = _WaveCache(target, rows, self.capacity)
        self.index = torch.arange(rows)  # row -> prompt of the wave
        self.pads = torch.tensor([self.width - len(p) for p in prompts], device=device)
        tokens = torch.zeros(rows, self.width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, self.width - len(prompt) :] = torch.tensor(prompt)
        end_ids = _end_tokens(target)
        self.filler = end_ids[0]
        self.ends = torch.tensor(end_ids, device=device)
        self.written = torch.zeros(rows, config.max_new_tokens, dtype=torch.long, device=device)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.positions = self.width - self.pads[:, None]
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._prefill(tokens.to(device))

    def _prefill(self, tokens: Tensor) -> None:
        columns = torch.arange(self.width, device=tokens.device)
        causal = columns[None, :] <= columns[:, None]
        own = torch.eye(self.width, dtype=torch.bool, device=tokens.device)
        last = []
        chunk = max(1, _PREFILL_TOKENS // self.width)
        for start in range(0, tokens.shape[0], chunk):
            rows = slice(start, min(start + chunk, tokens.shape[0]))
            pads = self.pads[rows, None]
            # A padding row sees itself: a row that sees nothing would turn into NaN.
            mask = (causal & (columns >= pads)[:, None, :]) | own
            self.cache.rows = rows
            output = self.target.decoder(
                input_ids=tokens[rows],
                attention_mask=mask[:, None],
                position_ids=(columns - pads).clamp(min=0),
                past_key_values=self.cache,
                use_cache=True,
            )
            last.append(output.last_hidden_state[:, -1])
        self.cache.slot.fill_(self.width)
        self._choose(torch.cat(last))

    def _choose(self, hidden: Tensor) -> None:
        """Pick, store and count the next token of every row."""
        logits = self.target.logits(hidden)
        if self.config.temperature > 0:
            # Gumbel's trick, as a ratio of exponentials: no sort, and it replays in a graph.
            noise = torch.empty_like(logits).exponential_()
            logits = torch.softmax(logits / self.config.temperature, dim=-1) / noise
        chosen = logits.argmax(-1).masked_fill(self.done, self.filler)
        self.written.index_copy_(1, self.step_index, chosen[:, None])
        self.done |= (chosen[:, None] == self.ends).any(-1)
        self.token.copy_(chosen[:, None])
        self.step_index += 1

    def step(self) -> None:
        """Decode one token for every row."""
        slots = torch.arange(self.cache.visible, device=self.token.device)
        seen = (slots >= self.pads[:, None]) & (slots <= self.cache.slot)
        bias = torch.zeros(seen.shape, dtype=self.target.embedding.dtype, device=seen.device)
        bias.masked_fill_(~seen, float("-inf"))
        output = self.target.decoder(
            input_ids=self.token,
            attention_mask=bias[:, None, None, :],
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.slot += 1
        self.positions += 1
        self._choose(output.last_hidden_state[:, -1])

    def run(self, finish: Callable[[int, list[int]], None], use_graph: bool) -> None:
        """Decode until every row is done, handing over each response with its row number."""
        remaining = self.config.max_new_tokens - 1
        taken = 1
        while remaining > 0 and not bool(self.done.all()):
            steps = min(SEGMENT_STEPS, remaining)
            self.cache.visible = min(self.capacity, _round_up(self.width + taken + steps, 64))
            for number, advance in enumerate(_steps(self.step, steps, use_graph)):
                advance()
                if number % _DONE_CHECK_STEPS == 0 and bool(self.done.all()):
                    break
            taken += steps
            remaining -= steps
            if remaining > 0 and float(self.done.float().mean()) > 0.2:
                self._retire(finish)
        self.done.fill_(True)
        self._retire(finish)

    def _retire(self, finish: Callable[[int, list[int]], None]) -> None:
        """Hand over the finished rows and keep the others."""
        done = self.done.cpu()
        count = int(self.step_index)
        ends = set(self.ends.tolist())
        written = self.written[self.done, :count].cpu().tolist()
        for row, response in zip(self.index[done].tolist(), written, strict=True):
            stop = next((i + 1 for i, token in enumerate(response) if token in ends), count)
            finish(row, response[:stop])
        alive = (~self.done).nonzero().squeeze(-1)
        self.cache.keep(alive)
        self.index = self.index[~done]
        for name in ("pads", "written", "positions", "token", "done"):
            setattr(self, name, getattr(self, name).index_select(0, alive))


def _steps(step: Callable[[], None], count: int, use_graph: bool) -> Iterator[Callable[[], None]]:
    """``count`` callables that each decode one token; from the third on they replay a graph.

    The first two are real steps: they warm up the kernels that the capture then records.
    """
    eager = min(count, 3) if use_graph else count
    for _ in range(eager):
        yield step
    if eager == count:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(count - eager):
        yield graph.replay


@torch.inference_mode()
def decode_all(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    config: GenerateSection,
    finish: Callable[[int, list[int]], None],
    use_graph: bool | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Continue every prompt until an end token or ``max_new_tokens``.

    Args:
        prompts: token ids.
        finish: called once for each prompt with its number and the response's ids, in no
            particular order.
        use_graph: replay CUDA graphs; by default on a GPU.
        stop: asked between waves; when true the remaining prompts are left out.
    """
    if use_graph is None:
        use_graph = target.device.type == "cuda"
    for wave in plan_waves([len(p) for p in prompts], config):
        if stop():
            return

        def hand_over(row: int, response: list[int], wave: list[int] = wave) -> None:
            finish(wave[row], response)

        _Wave(target, [prompts[i] for i in wave], config).run(hand_over, use_graph)


def plan_waves(lengths: Sequence[int], config: GenerateSection) -> list[list[int]]:
    """Group prompts of similar length, within the limits on rows and on cache tokens."""
    waves: list[list[int]] = []
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    while order:
        rows = config.batch_rows
        # Rows are ascending in length, so the widest row that fits is the last one.
        while rows > 1 and rows * (lengths[order[:rows][-1]] + config.max_new_tokens + 64) > (
            config.cache_tokens
        ):
            rows -= 1
        waves.append(order[:rows])
        order = order[rows:]
    return waves


def _end_tokens(target: TargetModel) -> list[int]:
    ends = target.config.eos_token_id
    if ends is None:
        return [-1]
    return list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
