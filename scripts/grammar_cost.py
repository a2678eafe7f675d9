#!/usr/bin/env python3
"""What structured output costs a step: rows under grammars against free rows, in the sampler alone. Prints one line a form.

scripts/grammar_cost.py MODEL [--batch 16]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from llguidance import LLMatcher

from headrace.core.messages import SlotStart
from headrace.runner.grammar_masks import GrammarMasks
from headrace.runner.sampler import Sampler
from headrace.runner.sampling_table import SamplingTable
from headrace.runner.token_history import TokenHistory
from headrace.sampling_params import SamplingParams, StructuredOutputs
from headrace.text.grammar_compiler import compile_matcher
from headrace.text.grammar_vocabulary import GrammarVocabulary
from headrace.text.tokenizer import Tokenizer

STEPS, WARM_UP = 60, 5
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}, "required": ["street", "city"]},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
    },
    "required": ["name", "age", "address", "tags"],
}
FORMS = {
    "free": None,
    "JSON schema": StructuredOutputs(kind="json_schema", source=json.dumps(PERSON)),
    "JSON object": StructuredOutputs(kind="json_object"),
    "regex": StructuredOutputs(kind="regex", source="([A-Z][a-z]+ ){2,60}[0-9]{4}-[0-9]{2}"),
}


class Source:
    """One compiled grammar for all requests."""

    def __init__(self, vocabulary: GrammarVocabulary, form: StructuredOutputs | None) -> None:
        tokenizer = vocabulary.library_tokenizer()
        self.end_token_ids = vocabulary.end_token_ids
        self.num_tokens = tokenizer.vocab_size
        self._matcher = None if form is None else compile_matcher(form, tokenizer)

    def new_matcher(self, request_id: str) -> LLMatcher | None:
        return None if self._matcher is None else self._matcher.deep_copy()


def measure(vocabulary: GrammarVocabulary, form: StructuredOutputs | None, batch: int) -> str:
    """The fastest of many steps, in microseconds of a core."""
    source = Source(vocabulary, form)
    vocab_size = source.num_tokens
    table, history = SamplingTable(batch), TokenHistory(num_slots=batch, max_model_len=STEPS + 8)
    masks = GrammarMasks(source, num_slots=batch, num_threads=1)
    sampler = Sampler(table=table, history=history, masks=masks, vocab_size=vocab_size, device=torch.device("cpu"))
    params = SamplingParams(structured=form, max_tokens=None, seed=1)

    def begin(slot: int) -> None:
        start = SlotStart(request_id=str(slot), slot=slot, token_ids=(1,), num_prompt_tokens=1, params=params, eos_token_ids=vocabulary.end_token_ids)
        history.start(start)
        table.start(start, key=slot, vocab_size=vocab_size)
        masks.start(start)

    for slot in range(batch):
        begin(slot)
    slots = list(range(batch))
    draw = torch.Generator().manual_seed(0)
    bare, consume, cost = [], [], []
    for step in range(STEPS):
        logits = torch.randn(batch, vocab_size, generator=draw) * 4
        if form is not None:
            masks.wait(slots)
        before = time.thread_time()
        sampled = sampler.sample(logits, slots)
        done = time.thread_time()
        assert not any(sampled.errors), sampled.errors
        history.append(slots, sampled.token_ids)
        seconds = masks.seconds
        if form is not None:
            for slot, token in zip(slots, sampled.token_ids, strict=True):
                if masks.consume(slot, token)[0] or history.length_S[slot] > STEPS:
                    begin(slot)
            ended = time.thread_time()
            masks.wait(slots)
            if step >= WARM_UP:
                consume.append(ended - done)
                cost.append(masks.seconds - seconds)
        if step >= WARM_UP:
            bare.append(done - before)
    masks.close()
    middle = [f"{min(values or [0.0]) * 1e6:7.0f}" for values in (bare, consume, cost)]
    return f"sampling {middle[0]}   tokens into grammars {middle[1]}   masks, in their threads {middle[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vocabulary = GrammarVocabulary.of(Tokenizer.load(arguments.model))
    print(f"{arguments.batch} rows, {len(vocabulary.tokens)} tokens; the fastest of {STEPS - WARM_UP} steps, microseconds of a core")
    for name, form in FORMS.items():
        print(f"{name:12} {measure(vocabulary, form, arguments.batch)}")


if __name__ == "__main__":
    main()
