"""Compiling grammars for a vocabulary, and trying them out."""

from __future__ import annotations

import random
import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar import grammar_of, refusal

# What the library may spend on one grammar and on one step of it.
LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
MAX_COMPILE_S = 3.0  # seconds of a core
PROBE_TOKENS = 24
MAX_PROBE_S = 0.6  # for the masks of so many tokens


def compile_matcher(structured: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the start of an answer, its first mask worked out already. Raises `InvalidRequest`.

    Call it in a thread with a stack of `grammar_bounds.STACK_BYTES`, and only with a form that a `GrammarChecker` has let pass: with others
    the library may work for a minute, or end the process.
    """
    matcher = LLMatcher(tokenizer, grammar_of(structured), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(structured, _reason(matcher))
    return matcher


def try_out(structured: StructuredOutputs, tokenizer: LLTokenizer) -> None:
    """Compiles the form and walks a little way through it. Raises `InvalidRequest` where it costs too much or leads nowhere."""
    begin = time.thread_time()
    matcher = compile_matcher(structured, tokenizer)
    if time.thread_time() - begin > MAX_COMPILE_S:
        raise refusal(structured, f"it takes more than {MAX_COMPILE_S:g} s to compile; make it simpler")
    begin = time.thread_time()
    draw = random.Random(0)
    for _ in range(PROBE_TOKENS):
        mask = matcher.compute_bitmask()
        num_allowed = sum(map(int.bit_count, mask))
        if matcher.is_error() or num_allowed == 0:
            break
        matcher.consume_token(_set_bit(mask, draw.randrange(num_allowed)))
        if time.thread_time() - begin > MAX_PROBE_S:
            raise refusal(structured, "it costs too much at each token; make it simpler")
        if matcher.is_stopped():
            break
    if matcher.is_error():
        raise refusal(structured, _reason(matcher))


def _set_bit(mask: bytes, number: int) -> int:
    """The place of a bit that is set, of which `number` others come before; low bits of a byte first. Without numpy, which would be
    a third of what the process of `grammar_worker` holds."""
    for index, byte in enumerate(mask):
        if number < byte.bit_count():
            return 8 * index + [bit for bit in range(8) if byte >> bit & 1][number]
        number -= byte.bit_count()
    raise IndexError(number)


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher is of no use, in words for whoever wrote the form."""
    error = matcher.get_error()
    return "it leads to texts that cannot be completed" if matcher.stop_reason() == "NoExtensionBias" or "NoExtensionBias" in error else error
