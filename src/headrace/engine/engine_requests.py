"""What a request becomes for the engine: limits resolved, ids checked, one engine request for each of its n choices."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.config import EngineInfo
from headrace.core.messages import AddRequest
from headrace.engine.timeline import Watcher
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.sampling_params import SamplingParams
from headrace.text.tokenizer import Tokenizer

INT64 = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and what is wanted of it."""

    request_id: str  # unique among the requests that run
    prompt_token_ids: tuple[int, ...]  # at least one
    params: SamplingParams
    priority: int = 0  # lower runs first
    deadline: float | None = None  # monotonic seconds; the first token after it is worthless
    tenant: str = ""
    cache_salt: str | None = None
    session_id: str | None = None
    background: bool = False  # nobody waits for it
    watcher: Watcher | None = None  # where it is traced


def engine_requests(request: GenerationRequest, info: EngineInfo, tokenizer: Tokenizer) -> list[AddRequest]:
    """The requests of choice 0 and of its forks, to be sent in this order.

    Every one generates at least one token, also where `max_tokens` is 0. `max_tokens` is cut to what the context has left.
    Raises `ContextLengthExceeded` and `InvalidRequest`.
    """
    check_fields(request, ("request_id", "tenant", "cache_salt", "session_id"))
    params = request.params
    if params.stop and not params.detokenize:
        raise InvalidRequest("Stop strings need the text: leave detokenize on, or use stop_token_ids.", param="stop")
    length = len(request.prompt_token_ids)
    if length == 0:
        raise InvalidRequest("The prompt has no tokens; at least one is needed.", param="prompt")
    room = info.max_model_len - length
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt has {length} tokens, but the context holds {info.max_model_len}, one of them for the answer: shorten the prompt.",
            param="prompt",
        )
    check_ids("prompt", request.prompt_token_ids, info.vocab_size)
    check_ids("logit_bias", tuple(params.logit_bias or ()), info.vocab_size)
    check_ids("allowed_token_ids", params.allowed_token_ids or (), info.vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    for word in params.bad_words_ids:
        check_ids("bad_words_ids", word, info.vocab_size)
    resolved = replace(
        params,
        n=1,
        max_tokens=room if params.max_tokens is None else max(1, min(params.max_tokens, room)),
        stop=(),  # found by the client, in the text
        bad_words=(),
        bad_words_ids=params.bad_words_ids + bad_words_ids(params.bad_words, tokenizer),
    )
    end_tokens = set(tokenizer.stop_token_ids)
    if tokenizer.eos_token_id is not None:
        end_tokens.add(tokenizer.eos_token_id)
    first = AddRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=resolved,
        arrival=time.monotonic(),
        eos_token_ids=() if params.ignore_eos else tuple(sorted(end_tokens)),
        priority=request.priority,
        deadline=request.deadline,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        session_id=request.session_id,
        background=request.background,
        traced=request.watcher is not None,
    )
    # The prompt is scored once, and its blocks are leased once, by choice 0.
    forks = [
        replace(
            first,
            request_id=f"{request.request_id}-{index}",
            params=replace(resolved, choice_index=index, prompt_logprobs=None),
            session_id=None,
            fork_of=request.request_id,
        )
        for index in range(1, params.n)
    ]
    return [first, *forks]


def bad_words_ids(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell the words, each as the start of a text and behind a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelling in (word, " " + word.lstrip(" ")):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False, parse_special=False))
            if ids:
                sequences[ids] = None
        bare = word.lstrip(" ")
        if bare and bare != word:
            sequences[tuple(tokenizer.encode(bare, add_special_tokens=False, parse_special=False))] = None
    return tuple(sequences)


def check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """Refuses ids that the model has no row for."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequest(f"{name} holds the token id {wrong}; the vocabulary goes from 0 to {vocab_size - 1}.", param=name)


class Scheduled(Protocol):
    """What the engine's order goes by."""

    @property
    def priority(self) -> int: ...

    @property
    def deadline(self) -> float | None: ...


def check_fields(request: Scheduled, texts: tuple[str, ...]) -> None:
    """Refuses what could not cross to the engine. `texts`: the fields that are texts."""
    for name in texts:
        value = getattr(request, name)
        if value is not None and not _is_unicode(value):
            raise InvalidRequest(f"{name} holds a lone surrogate, which is no character.", param=name)
    if not -INT64 <= request.priority < INT64:
        raise InvalidRequest(f"priority must fit 64 bits, not {request.priority}.", param="priority")
    if request.deadline is not None and not math.isfinite(request.deadline):
        raise InvalidRequest(f"deadline must be a finite number, not {request.deadline}.", param="deadline")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
