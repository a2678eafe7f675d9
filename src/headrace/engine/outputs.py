"""What the offline interface returns; names and meaning as in vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.messages import FinishReason, TokenLogprobs
from headrace.engine.choice import ChoiceDelta
from headrace.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class Logprob:
    logprob: float
    rank: int  # 1: likeliest
    decoded_token: str


PositionLogprobs = dict[int, Logprob]  # token id -> its score: the token that stands there, and the likeliest ones


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # sum over token_ids, where logprobs were asked for
    logprobs: list[PositionLogprobs] | None = None  # one per token id
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: int | str | None = None
    num_preemptions: int = 0  # times it gave its memory to others and came back


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Monotonic seconds."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its choices."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # one per prompt token; the first is None
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics
    num_cached_tokens: int | None = None  # prompt tokens taken from the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    embedding: list[float]  # of length 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0


class OutputBuilder:
    """Gathers the deltas of one request into its `RequestOutput`, which grows in place."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], n: int, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[CompletionOutput(index=index) for index in range(n)],
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )

    def add(self, delta: ChoiceDelta) -> None:
        output, choice = self.output, self.output.outputs[delta.index]
        if delta.token_ids and output.metrics.first_token_time is None:
            output.metrics.first_token_time = time.monotonic()
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.num_preemptions = delta.num_preemptions
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + [self._position(entry) for entry in delta.logprobs]
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(entry.logprob for entry in delta.logprobs)
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *(self._position(entry) for entry in delta.prompt_logprobs)]
        if delta.cached_tokens is not None and delta.index == 0:
            output.num_cached_tokens = delta.cached_tokens
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            output.finished = all(other.finish_reason is not None for other in output.outputs)
            if output.finished:
                output.metrics.finished_time = time.monotonic()

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        scores = {entry.token_id: self._score(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            scores.setdefault(token_id, self._score(token_id, logprob, rank))
        return scores

    def _score(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob=logprob, rank=rank, decoded_token=self._tokenizer.decode([token_id], skip_special_tokens=False))
