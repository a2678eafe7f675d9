"""One of the n choices of a request, from the engine's tokens to text."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.messages import FinishReason, TokenLogprobs, TokenOutput
from headrace.sampling_params import SamplingParams
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop_checker import StopChecker
from headrace.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)  # not frozen: that would treble the time to make one, which is done at each token
class ChoiceDelta:
    """What is new of one choice since its last delta. All deltas of a choice, joined, are its whole answer."""

    index: int  # which choice
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token id, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # whole, once, on choice 0; the first prompt token has none
    cached_tokens: int | None = None  # prompt tokens taken from the prefix cache; once
    finish_reason: FinishReason | None = None  # on the last delta only
    stop_reason: int | str | None = None  # with finish_reason "stop": the stop token id or stop string, None for an end token
    num_preemptions: int = 0


class Choice:
    """Takes outputs as they come (`push`), gives back what has gathered since the last time (`take`).

    The token that completes a stop string is the last one: tokens that the engine computed past it are dropped, with their logprobs.
    The token that ended the answer (end token, `stop_token_ids`) is counted but has no text, unless the stop is to be included.
    `limit` 0 drops every token: for requests that want the scores of their prompt only.
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer, *, limit: int) -> None:
        self.index = index
        self.finished = False
        self._limit = limit
        self._min_tokens = params.min_tokens
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, shown_token_ids=params.shown_token_ids, continues=True)
            if params.detokenize
            else None
        )
        self._checker = StopChecker(self._stop, include_stop_str=self._include_stop) if self._stop else None
        self._held = ""  # text that the checker has and may still give
        self._num_tokens = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._cached_tokens: int | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._num_preemptions = 0

    def push(self, output: TokenOutput) -> bool:
        """Takes one output. True if a stop string ended the choice before the engine did: the caller must stop the engine's part."""
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        if output.cached_tokens is not None:
            self._cached_tokens = output.cached_tokens
        self._num_preemptions = output.num_preemptions
        if self._limit == 0:
            if output.finish_reason is not None:
                self._finish("abort" if output.finish_reason == "abort" else "length", None)
            return False
        ended = output.finish_reason
        silent = 1 if ended == "stop" and output.token_ids and not (self._include_stop or output.ends_in_text) else 0  # the end token itself
        kept, matched = self._push_text(output.token_ids[: len(output.token_ids) - silent])
        if matched is None:
            kept = len(output.token_ids)
            if ended is not None:
                matched = self._finish_text()
        self._num_tokens += kept
        self._token_ids += output.token_ids[:kept]
        if output.logprobs is not None:
            self._logprobs = (self._logprobs or []) + list(output.logprobs[:kept])
        if matched is not None:
            self._finish("stop", matched)
        elif ended is not None:
            self._finish(ended, output.stop_reason)
        return matched is not None and ended is None

    def take(self) -> ChoiceDelta:
        """What has gathered since the last call."""
        delta = ChoiceDelta(
            index=self.index,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            cached_tokens=self._cached_tokens,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            num_preemptions=self._num_preemptions,
        )
        self._text.clear()
        self._token_ids.clear()
        self._logprobs = self._prompt_logprobs = self._cached_tokens = None
        return delta

    def _push_text(self, token_ids: tuple[int, ...]) -> tuple[int, str | None]:
        """Adds the tokens' text. Returns (tokens up to and with the one that completed a stop string, that string), or (0, None)."""
        if self._detokenizer is None:
            return 0, None
        if self._checker is None:
            self._text.append(self._detokenizer.push(token_ids))
            return 0, None
        for position, token_id in enumerate(token_ids, start=1):
            matched = self._check(self._detokenizer.push((token_id,)), self._num_tokens + position)
            if matched is not None:
                return position, matched
        return 0, None

    def _finish_text(self) -> str | None:
        """Adds the text that was held back; returns the stop string that it completed, if any."""
        if self._detokenizer is None:
            return None
        rest = self._detokenizer.finish()
        if self._checker is None:
            self._text.append(rest)
            return None
        matched = self._check(rest, self._min_tokens)
        if matched is None:
            self._text.append(self._checker.finish())
        return matched

    def _check(self, text: str, num_tokens: int) -> str | None:
        """Adds what of `text`, completed by token number `num_tokens`, is no part of a stop string; returns the stop string it completed.

        One that is complete before `min_tokens` is ordinary text: it is given out whole, and the search begins anew behind it.
        """
        assert self._checker is not None
        emit, matched = self._checker.push(text)
        self._held += text
        if matched is not None and num_tokens < self._min_tokens:
            emit, matched = self._held, None
            self._checker = StopChecker(self._stop, include_stop_str=self._include_stop)
        self._held = self._held[len(emit) :]
        self._text.append(emit)
        return matched

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finished = True
        self._finish_reason = reason
        self._stop_reason = stop_reason
