#!/usr/bin/env python3
"""How fast the CPU kernels attend over a paged cache, by kind of work and of kernel, as a table.

    python scripts/attention_speed.py
    python scripts/attention_speed.py --threads 1 --heads 32 --kv-heads 8 --head-dim 128

Sizes are those of the default model. Counted are the multiplications and additions of scores and sums over the positions that a token sees. The
time is the best of `--rounds` calls: others on the machine make the rest.
"""

from __future__ import annotations

import argparse
import time

import torch

from headrace.kernels import cpu
from headrace.kernels.attention import AttentionMetadata

BLOCK = 16
WORK = {"a prompt of 2,048": (2048, 2048), "a prompt of 128": (128, 128), "a chunk of 32 at 4,000": (32, 4000), "one token at 4,000": (1, 4000)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16", "float16"), default="float16")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    loaded = cpu.load()
    if loaded is None:
        parser.error(f"there are no kernels: {cpu.reason()}")
    print(f"{loaded.isa}, {options.threads} threads, {options.kv_dtype} cache; GFLOP/s (ms)")
    print(f"{'':24} {'in float32':>20} {'prompts in bfloat16':>20}")
    for name, (tokens, context) in WORK.items():
        operations = 4 * options.heads * options.head_dim * sum(range(context - tokens + 1, context + 1))
        seconds = best_of(options, tokens, context)
        print(f"{name:24} " + " ".join(f"{f'{operations / s / 1e9:.0f} ({s * 1e3:.2f})':>20}" for s in seconds))


def best_of(options: argparse.Namespace, tokens: int, context: int) -> tuple[float, float]:
    """Seconds of one layer, in float32 and as prompts may go; by turns, so that a slow minute hits both."""
    blocks = -(-context // BLOCK)
    k_cache, v_cache = (torch.randn(blocks, BLOCK, options.kv_heads, options.head_dim).to(getattr(torch, options.kv_dtype)) for _ in range(2))
    q_THD = torch.randn(tokens, options.heads, options.head_dim)
    meta = AttentionMetadata(
        query_start_R1=torch.tensor([0, tokens], dtype=torch.int32),
        context_len_R=torch.tensor([context], dtype=torch.int32),
        block_table_RB=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping_T=torch.zeros(tokens, dtype=torch.int64),
        positions_T=torch.arange(context - tokens, context),
        query_lens=[tokens],
        context_lens=[context],
        num_decode_rows=0,
        prompt_tokens_R=torch.tensor([tokens], dtype=torch.int32),
    )
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.rounds):
        for in_bfloat16, of_kind in enumerate(times):
            start = time.perf_counter()
            cpu.paged_attention(q_THD, k_cache, v_cache, meta, scale=options.head_dim**-0.5, prompts_in_bfloat16=bool(in_bfloat16))
            of_kind.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])


if __name__ == "__main__":
    main()
