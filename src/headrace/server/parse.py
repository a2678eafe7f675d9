"""From a body to token ids and sampling parameters. After this there is no JSON, and text only where it is echoed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.sampling_params import SamplingParams
from headrace.server.schema import CompletionBody, GenerationBody, SamplingBody
from headrace.server.service import LoadedModel
from headrace.server.structured import structured_outputs
from headrace.text.answer_events import AnswerParser
from headrace.text.reasoning import ReasoningCounter

MAX_CHOICES = 1024  # prompts x n of one request
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI documents it for /v1/completions

# fields whose name and meaning are those of SamplingParams
SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("min_tokens", "stop", "include_stop_str_in_output", "ignore_eos", "bad_words", "prompt_logprobs", "skip_special_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: tuple[int, ...]
    params: SamplingParams  # max_tokens is what this prompt leaves room for
    echo_text: str = ""  # put before the answer
    new_parser: Callable[[], AnswerParser] | None = None  # chats: reads the answer's text; one for each choice
    new_counter: Callable[[], ReasoningCounter] | None = None  # where there may be reasoning; one for each choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """What the routes generate from; choice j of prompt i has index i * n + j."""

    model: str  # the name to answer under
    prompt_field: str  # the field of the body that holds the prompt
    prompts: tuple[Prompt, ...]
    stream: bool
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False  # completions: the prompt's tokens are part of the answer, and of its logprobs
    logprobs: int | None = None  # alternatives per token in the answer; None: no logprobs
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    priority: int = 0
    deadline_ms: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None


def token_ids(value: Any, vocab_size: int, param: str) -> tuple[int, ...]:
    """Check a list of ids: whole numbers of the vocabulary."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be a list of token ids.", param=param)
    for item in value:
        if type(item) is not int:
            raise InvalidRequest(f"{param} must hold whole numbers only, not {shown(item)}.", param=param)
        if not 0 <= item < vocab_size:
            raise InvalidRequest(f"{param}: token id {shown(item)} is outside of the vocabulary (0 to {vocab_size - 1}).", param=param)
    return tuple(value)


def shown(value: Any) -> str:
    """A short form of a value for an error message; lists and objects are named, not repeated."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def encode_prompt(text: str, model: LoadedModel, *, add_special_tokens: bool, bounded: bool, param: str = "prompt") -> tuple[int, ...]:
    if bounded:
        check_least_length(len(text), model, param)
    return tuple(model.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def check_least_length(characters: int, model: LoadedModel, param: str) -> None:
    """Refuse a text that cannot fit, before it is tokenised: no token is longer than the longest one."""
    least = -(-characters // model.tokenizer.max_token_bytes)
    if least > model.info.max_model_len:
        raise ContextLengthExceeded(
            f"This model's context length is {model.info.max_model_len} tokens, but {param} has at least {least} tokens; shorten it.", param=param
        )


def prompt_list(
    value: Any, model: LoadedModel, encode: Callable[[str], tuple[int, ...]], *, param: str = "prompt", limit: int = MAX_CHOICES
) -> list[tuple[tuple[int, ...], str | None]]:
    """The prompts of a field as (ids, text if it was given as text): text, ids, or a list of at most `limit` of these."""
    if isinstance(value, str):
        return [(encode(value), value)]
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} is required: a text, a list of token ids, or a list of these.", param=param)
    if not value:
        raise InvalidRequest(f"{param} must not be an empty list.", param=param)
    if len(value) > limit and isinstance(value[0], str | list):
        raise InvalidRequest(f"{param} holds {len(value)} texts or lists; at most {limit} are allowed in one request.", param=param)
    if all(isinstance(item, str) for item in value):
        return [(encode(item), item) for item in value]
    if all(isinstance(item, list) for item in value):
        return [(token_ids(item, model.vocab_size, param), None) for item in value]
    return [(token_ids(value, model.vocab_size, param), None)]


def sampling_params(body: SamplingBody, model: LoadedModel, *, max_tokens: int | None, limit_field: str, logprobs: int | None) -> SamplingParams:
    """Checked parameters with the limit as it was asked for; raises `InvalidRequest` that names the field of the body."""
    fields: dict[str, Any] = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name, None)) is not None}
    for name in ("stop_token_ids", "allowed_token_ids"):
        if getattr(body, name) is not None:
            fields[name] = tuple(dict.fromkeys(token_ids(getattr(body, name), model.vocab_size, name)))
    if body.logit_bias is not None:
        fields["logit_bias"] = logit_bias(body.logit_bias, model.vocab_size)
    if logprobs is not None:
        fields["logprobs"] = logprobs
    if max_tokens is not None and not 0 <= max_tokens < 2**31:
        raise InvalidRequest(f"{limit_field} must be a whole number from 1 to {2**31 - 1}, not {shown(max_tokens)}.", param=limit_field)
    return SamplingParams(max_tokens=max_tokens, **fields)


def logit_bias(value: dict[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise InvalidRequest(f"logit_bias: {shown(key)} is no token id of the vocabulary (0 to {vocab_size - 1}).", param="logit_bias")
        biases[int(key)] = bias
    return biases


def fit(
    ids: tuple[int, ...], params: SamplingParams, model: LoadedModel, *, default: int | None, limit_field: str, prompt_field: str
) -> SamplingParams:
    """The parameters with max_tokens as a number that the context has room for; raises `ContextLengthExceeded`."""
    context = model.info.max_model_len
    room = context - len(ids)
    if not ids:
        raise InvalidRequest(f"{prompt_field} must hold at least one token.", param=prompt_field)
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's context length is {context} tokens; the prompt has {len(ids)} tokens, which leaves no room for an answer. "
            "Shorten the prompt.",
            param=prompt_field,
        )
    limit = params.max_tokens
    if limit is None:
        limit = room if default is None else min(default, room)
    elif limit > room:
        raise ContextLengthExceeded(
            f"This model's context length is {context} tokens; the prompt has {len(ids)} tokens and {limit_field} asks for {limit} more. "
            f"Set {limit_field} to at most {room}, or shorten the prompt.",
            param=limit_field,
        )
    return params if limit == params.max_tokens else dataclasses.replace(params, max_tokens=limit)


def truncate(ids: tuple[int, ...], count: int | None, model: LoadedModel) -> tuple[int, ...]:
    """The last `count` tokens; -1: as many as leave room for one token."""
    if count is None:
        return ids
    if count == -1:
        count = model.info.max_model_len - 1
    if not 1 <= count < model.info.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or from 1 to {model.info.max_model_len - 1}, not {count}.", param="truncate_prompt_tokens"
        )
    return ids[-count:]


def common(body: GenerationBody, *, model_name: str, prompt_field: str, prompts: list[Prompt], n: int, logprobs: int | None) -> ParsedRequest:
    """The request as all generating routes have it."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options is allowed only together with stream: true.", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available in a stream; leave stream out.", param="prompt_logprobs")
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts with n={n} make more than {MAX_CHOICES} choices; send fewer at once.", param="n")
    return ParsedRequest(
        model=model_name,
        prompt_field=prompt_field,
        prompts=tuple(prompts),
        n=n,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.include_usage) and bool(options.continuous_usage_stats),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
    )


def parse_completion(body: CompletionBody, model: LoadedModel, model_name: str) -> ParsedRequest:
    params = sampling_params(body, model, max_tokens=body.max_tokens, limit_field="max_tokens", logprobs=body.logprobs)
    if (structured := structured_outputs(body)) is not None:
        params = dataclasses.replace(params, structured=structured)
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens must be at least 1; 0 is allowed only with echo.", param="max_tokens")
    if echo and body.logprobs is not None:
        params = dataclasses.replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    bounded = body.truncate_prompt_tokens is None
    special = body.add_special_tokens is not False
    prompts = []
    for ids, text in prompt_list(body.prompt, model, lambda text: encode_prompt(text, model, add_special_tokens=special, bounded=bounded)):
        kept = truncate(ids, body.truncate_prompt_tokens, model)
        if echo and (text is None or kept != ids):
            text = model.tokenizer.decode(list(kept), skip_special_tokens=False)
        fitted = fit(kept, params, model, default=DEFAULT_COMPLETION_TOKENS, limit_field="max_tokens", prompt_field="prompt")
        prompts.append(Prompt(token_ids=kept, params=fitted, echo_text=(text or "") if echo else ""))
    request = common(body, model_name=model_name, prompt_field="prompt", prompts=prompts, n=params.n, logprobs=body.logprobs)
    return dataclasses.replace(request, echo=echo) if echo else request
