"""The sampling options of every slot, laid out as arrays so that a step picks its rows' values with one index."""

from __future__ import annotations

from enum import IntFlag

import numpy as np

from headrace.core.messages import SlotStart


class Need(IntFlag):
    """What a slot's rows need beyond the largest logit."""

    RANDOM = 1  # a draw
    FILTER = 2  # top_k, top_p or min_p before the draw
    PENALTY = 4
    BIAS = 8
    ALLOWED = 16
    BAD_WORDS = 32
    MIN_TOKENS = 64
    LOGPROBS = 128
    GRAMMAR = 256


SHAPED = Need.PENALTY | Need.BIAS | Need.ALLOWED | Need.BAD_WORDS | Need.MIN_TOKENS | Need.GRAMMAR
_NO_IDS = np.zeros(0, dtype=np.int64)


class SamplingTable:
    """Arrays over the slots; the lists hold what has no fixed size."""

    def __init__(self, num_slots: int) -> None:
        self.need = np.zeros(num_slots, dtype=np.int64)  # Need
        self.key = np.zeros(num_slots, dtype=np.uint64)  # of headrace.runner.draws
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int64)  # 0: off
        self.top_p = np.ones(num_slots, dtype=np.float32)
        self.min_p = np.zeros(num_slots, dtype=np.float32)
        self.repetition_penalty = np.ones(num_slots, dtype=np.float32)
        self.presence_penalty = np.zeros(num_slots, dtype=np.float32)
        self.frequency_penalty = np.zeros(num_slots, dtype=np.float32)
        self.min_tokens = np.zeros(num_slots, dtype=np.int64)
        self.logprobs = np.zeros(num_slots, dtype=np.int64)
        self.bias_ids = [_NO_IDS] * num_slots
        self.bias_values = [np.zeros(0, dtype=np.float32)] * num_slots
        self.allowed_ids = [_NO_IDS] * num_slots
        self.end_ids = [_NO_IDS] * num_slots  # not before min_tokens
        self.bad_words: list[tuple[tuple[int, ...], ...]] = [()] * num_slots

    def start(self, start: SlotStart, *, key: int, vocab_size: int) -> str | None:
        """Enters a request. Returns why its options can't be honoured, or None."""
        slot, params = start.slot, start.params
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
        bad_words = tuple(word for word in params.bad_words_ids if word)
        named = {"logit_bias": bias, "allowed_token_ids": allowed, "bad_words": [token for word in bad_words for token in word]}
        for name, token_ids in named.items():
            beyond = [token for token in token_ids if not 0 <= token < vocab_size]
            if beyond:
                return f"{name} names token {beyond[0]}; the vocabulary has {vocab_size}"
        top_k = 0 if params.top_k < 0 else min(params.top_k, vocab_size)
        end_ids = {token for token in (*start.eos_token_ids, *params.stop_token_ids) if 0 <= token < vocab_size}
        penalty = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        random = not params.greedy and top_k != 1  # one candidate needs no draw
        needs = {
            Need.RANDOM: random,
            Need.FILTER: random and (top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0),
            Need.PENALTY: penalty,
            Need.BIAS: bool(bias),
            Need.ALLOWED: bool(allowed),
            Need.BAD_WORDS: bool(bad_words),
            Need.MIN_TOKENS: params.min_tokens > 0 and bool(end_ids),
            Need.LOGPROBS: params.logprobs is not None,
            Need.GRAMMAR: params.structured is not None,
        }
        self.need[slot] = sum(need for need, present in needs.items() if present)
        self.key[slot] = key
        self.temperature[slot] = params.temperature if random else 1.0
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = top_k, params.top_p, params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot], self.frequency_penalty[slot] = params.presence_penalty, params.frequency_penalty
        self.min_tokens[slot] = params.min_tokens
        self.logprobs[slot] = params.logprobs or 0
        self.bias_ids[slot] = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self.bias_values[slot] = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self.allowed_ids[slot] = np.asarray(sorted(set(allowed)), dtype=np.int64)
        self.end_ids[slot] = np.asarray(sorted(end_ids), dtype=np.int64)
        self.bad_words[slot] = bad_words
        return None
