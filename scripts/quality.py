#!/usr/bin/env python3
"""What quantised weights, and keys and values of fewer bits, cost in quality: perplexity and agreement with fp32, as a table.

    python scripts/quality.py
    python scripts/quality.py MODEL

The text is one that the tests ship with. Argmax: at how many places of it the likeliest next token is the one in fp32. Greedy: how many of
the tokens after each prompt are those of fp32 at the same place; where an answer once takes another word, most that follow differ.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from headrace import LLM, SamplingParams
from headrace.models.loader import find_gguf
from headrace.models.store import resolve_model

TEXT = Path(__file__).resolve().parents[1] / "tests" / "models" / "harbour.txt"
NUM_PROMPTS = 16
PROMPT_TOKENS = 24
NEW_TOKENS = 32
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": NUM_PROMPTS, "kv_memory": 256 << 20}
REFERENCE = "none (fp32)"
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32", "quantization": "none"},
    "gguf, KV float32": {"quantization": "gguf", "kv_cache_dtype": "float32"},
    "gguf, KV float16": {"quantization": "gguf", "kv_cache_dtype": "float16"},
    "int8, KV float16": {"quantization": "int8", "kv_cache_dtype": "float16"},
    "int4, KV float16": {"quantization": "int4", "kv_cache_dtype": "float16"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What one way of computing gives."""

    perplexity: float
    argmax: list[int]  # the likeliest token at each place of the text but the first
    answers: list[list[int]]
    weight_bytes: int


def prompts(ids: Sequence[int]) -> list[list[int]]:
    """Pieces of the text, from its beginning to its end."""
    last = len(ids) - PROMPT_TOKENS
    return [list(ids[start : start + PROMPT_TOKENS]) for start in (last * index // (NUM_PROMPTS - 1) for index in range(NUM_PROMPTS))]


def greedy(llm: LLM, pieces: Sequence[Sequence[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(piece)} for piece in pieces], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def measure(llm: LLM) -> Quality:
    ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    scored = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
    assert scored is not None, "they were asked for"
    places = [(token, place) for token, place in zip(ids, scored, strict=True) if place is not None]
    return Quality(
        perplexity=math.exp(-sum(place[token].logprob for token, place in places) / len(places)),
        argmax=[min(place, key=lambda token: place[token].rank or math.inf) for _, place in places],
        answers=greedy(llm, prompts(ids)),
        weight_bytes=llm.info.weight_bytes,
    )


def share_alike(ours: Sequence[int], theirs: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(theirs)


def table(measured: dict[str, Quality]) -> str:
    """In Markdown, each way beside `REFERENCE`."""
    reference = measured[REFERENCE]
    flat = [token for answer in reference.answers for token in answer]
    lines = ["| weights | perplexity | difference | argmax | greedy | weights, MiB |", "|---|---|---|---|---|---|"]
    for name, quality in measured.items():
        argmax = share_alike(quality.argmax, reference.argmax)
        same = share_alike([token for answer in quality.answers for token in answer], flat)
        difference = 100 * (quality.perplexity / reference.perplexity - 1)
        lines.append(f"| {name} | {quality.perplexity:.4f} | {difference:+.4f} % | {argmax:.1%} | {same:.1%} | {quality.weight_bytes / 2**20:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory, GGUF file or hub name; default: the default model")
    model = resolve_model(parser.parse_args().model)
    ways = {name: options for name, options in WAYS.items() if options["quantization"] != "gguf" or find_gguf(model) is not None}
    measured: dict[str, Quality] = {}
    with tqdm(ways.items(), unit="way") as bar:
        for name, options in bar:
            bar.set_description(name)
            with LLM(str(model), **OPTIONS, **options) as llm:
                measured[name] = measure(llm)
    print(table(measured))


if __name__ == "__main__":
    main()
