"""One streamed chat completion, timed: SGLang's OpenAI-compatible route over server-sent events."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx
import msgspec

CHAT_ROUTE = "/v1/chat/completions"
_GOLDEN_RATIO = 0.6180339887  # its multiples, modulo 1, fill the unit interval evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the server is asked to generate.

    Attributes:
        max_tokens: most tokens to generate.
        spread: how far a request's ``max_tokens`` may be from that, as a share of it (see
            `of_request`); with 0 all answers that do not end by themselves are equally long, and
            requests that run at one speed start and end together, as real ones do not.
        temperature: 0 is greedy.
        ignore_eos: go on to ``max_tokens`` whatever the model says, for runs of equal work.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    spread: float = 0.0

    def of_request(self, number: int) -> "Sampling":
        """How request ``number`` is sampled: lengths are spread evenly, and the same every time."""
        place = number * _GOLDEN_RATIO % 1.0
        scale = 1 + self.spread * (2 * place - 1)
        return replace(self, max_tokens=max(1, round(self.max_tokens * scale)), spread=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """What became of one request. Times are seconds of the client's monotonic clock.

    Attributes:
        first_token_s: arrival of the first text; ``None`` if there was none.
        finished_s: arrival of the last text (end of the request if there was none).
        completion_tokens: tokens generated, as counted by the server; 0 after an error.
        target_passes: verification passes of the target (SGLang's ``spec_verify_ct``); ``None``
            if the server does not speculate.
        gaps_s: seconds between consecutive pieces of text, as they arrived. With
            ``--stream-interval 1`` a piece is what a decode step committed, unless it ends within a
            character: that is held back for the next piece.
        error: what went wrong, in one line; ``None`` for a complete answer.
    """

    started_s: float
    first_token_s: float | None
    finished_s: float
    completion_tokens: int = 0
    target_passes: int | None = None
    gaps_s: tuple[float, ...] = ()
    text: str = ""
    error: str | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from sending the request to the first text."""
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first; ``None`` for fewer than two tokens."""
        if self.first_token_s is None or self.completion_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.completion_tokens - 1)


# The parts of a chunk that are read; the decoder skips the rest without building objects for it.
class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _SpecTokens(msgspec.Struct):
    spec_verify_ct: int = 0


class _Extension(msgspec.Struct):
    spec_tokens_details: _SpecTokens | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    sglext: _Extension | None = None
    error: dict[str, object] | str | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


def chat_request(prompt: str, sampling: Sampling) -> dict[str, object]:
    """JSON body of a streamed, single-turn chat request, with usage and speculation counters."""
    body: dict[str, object] = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_tokens_details": True,
    }
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    return body


async def stream_chat(
    client: httpx.AsyncClient,
    url: str,
    prompt: str,
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
) -> RequestOutcome:
    """Send one request and follow its stream to the end; failures are returned, not raised.

    Args:
        client: shared by all requests of a run.
        url: base URL of the server.
        on_text: called with every piece of text as it arrives.
    """
    stream = _Stream(on_text)
    started = time.perf_counter()
    try:
        async with client.stream(
            "POST", f"{url}{CHAT_ROUTE}", json=chat_request(prompt, sampling)
        ) as response:
            if response.status_code != httpx.codes.OK:
                body = (await response.aread()).decode(errors="replace")
                stream.error = f"HTTP {response.status_code}: {body[:200]}"
            else:
                async for line in response.aiter_lines():
                    stream.feed(line)
                if not stream.done and stream.error is None:
                    stream.error = "the stream ended early"
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    return RequestOutcome(
        started_s=started,
        first_token_s=stream.first_s,
        finished_s=stream.last_s if stream.last_s is not None else time.perf_counter(),
        completion_tokens=0 if stream.error else stream.completion_tokens,
        target_passes=stream.target_passes,
        gaps_s=tuple(stream.gaps),
        text="".join(stream.pieces),
        error=stream.error,
    )


class _Stream:
    """What has been read of one event stream."""

    def __init__(self, on_text: Callable[[str], None] | None) -> None:
        self.on_text = on_text
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.gaps: list[float] = []
        self.pieces: list[str] = []
        self.completion_tokens = 0
        self.target_passes: int | None = None
        self.done = False
        self.error: str | None = None

    def feed(self, line: str) -> None:
        """Take one line of the stream."""
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        chunk = _DECODER.decode(data)
        if chunk.error is not None:
            self.error = str(chunk.error)[:200]
        for choice in chunk.choices:
            if choice.delta.content:
                now = time.perf_counter()
                if self.last_s is not None:
                    self.gaps.append(now - self.last_s)
                self.last_s = now
                self.first_s = self.first_s or now
                self.pieces.append(choice.delta.content)
                if self.on_text is not None:
                    self.on_text(choice.delta.content)
        if chunk.usage is not None:
            self.completion_tokens = chunk.usage.completion_tokens
        if chunk.sglext is not None and chunk.sglext.spec_tokens_details is not None:
            self.target_passes = chunk.sglext.spec_tokens_details.spec_verify_ct
