"""What a caller may ask of the sampler. One frozen value, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_N = 128
GREEDY_TEMPERATURE = 1e-5  # at or below this the largest logit wins: dividing by less would overflow fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A form that the whole text of an answer keeps, held by a grammar that masks tokens."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    source: str = ""  # the schema as JSON text; nothing for json_object; the expression; the choices as a JSON list of texts; a Lark grammar or GBNF
    param: str = "structured"  # the field of the request that errors name
    rule_params: tuple[tuple[str, str], ...] = ()  # of a grammar that was made of several fields: (rule, the field it holds), for errors in that rule


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request; names and meaning as in vLLM.

    Raises `InvalidRequest`, which names the field, for a value out of range.
    """

    n: int = 1  # choices per prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1], relative to the likeliest token
    presence_penalty: float = 0.0  # [-2, 2], over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2], over generated tokens
    repetition_penalty: float = 1.0  # > 0, over prompt and generated tokens
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit, [-100, 100]
    seed: int | None = None  # fixes the draw whatever the batch mates; choice i of n draws from (seed, i)
    max_tokens: int | None = 16  # None: up to the end of the context
    min_tokens: int = 0  # no end token and no stop before so many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()  # the client turns them into bad_words_ids
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None  # None: none; k: the sampled token and the k likeliest
    prompt_logprobs: int | None = None
    structured: StructuredOutputs | None = None  # the form that the answer keeps
    skip_special_tokens: bool = True
    shown_token_ids: tuple[int, ...] = ()  # special tokens that are part of the text even where others are left out of it
    detokenize: bool = True
    choice_index: int = field(default=0)  # which of the n choices this engine request is; set by the client

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        self._check_range("n", self.n, 1, MAX_N)
        self._check_range("temperature", self.temperature, 0.0, 1e6)
        self._check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0; use temperature 0 for greedy decoding.", param="top_p")
        self._check_range("top_k", self.top_k, -1, 2**31 - 1)
        self._check_range("min_p", self.min_p, 0.0, 1.0)
        self._check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_range("repetition_penalty", self.repetition_penalty, 0.0, 1e6)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be above 0.", param="repetition_penalty")
        if self.seed is not None:
            self._check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            self._check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        self._check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).", param="min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                self._check_range(name, value, 0, MAX_LOGPROBS)
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias) or not -100 <= bias <= 100:
                raise InvalidRequest(f"logit_bias of token {token} must be from -100 to 100, not {bias}.", param="logit_bias")
        if any(not text for text in self.stop):
            raise InvalidRequest("A stop string must not be empty.", param="stop")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"At most {MAX_STOP_STRINGS} stop strings are allowed.", param="stop")
        if any(not text for text in self.bad_words):
            raise InvalidRequest("A bad word must not be empty.", param="bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty.", param="allowed_token_ids")
        if self.structured is not None and not isinstance(self.structured, StructuredOutputs):
            raise InvalidRequest("structured must be a StructuredOutputs.", param="structured")

    @staticmethod
    def _check_range(name: str, value: float, low: float, high: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number, not {value!r}.", param=name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must be from {low} to {high}, not {value}.", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE
