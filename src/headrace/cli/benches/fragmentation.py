"""`headrace bench fragmentation`: what contiguous places for keys and values waste, and what blocks do."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headrace.cli import values
from headrace.cli.benches.provenance import provenance
from headrace.cli.options import reader
from headrace.errors import ConfigError

EPILOG = """\
examples:
  headrace bench fragmentation
  headrace bench fragmentation --kv-tokens 65536 --max-model-len 4096 --block-sizes 16,64

A simulation, which needs no model: requests wait in a queue that never empties, and their keys and values get slots of the longest request,
regions of their own limit, or blocks (by the code that Headrace serves with). `unused of reserved` is the share of what is given out that
holds nothing yet.
"""


def add_actions(actions: Any) -> None:
    parser: argparse.ArgumentParser = actions.add_parser(
        "fragmentation",
        help="contiguous places for keys and values against blocks",
        description="Contiguous places for keys and values against blocks: unused memory and admitted requests, by simulation.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--kv-tokens", type=reader(values.count), default=16384, metavar="N", help="tokens that the memory holds (default: %(default)s)")
    add("--max-model-len", type=reader(values.count), default=2048, metavar="N", help="longest request, the size of a slot (default: %(default)s)")
    add("--block-sizes", type=reader(values.counts), default=(8, 16, 32, 64, 128, 256), metavar="N,N", help="tokens (default: 8,16,32,64,128,256)")
    add("--requests", type=reader(values.positive_integer), default=1000, metavar="N", help="that are served (default: %(default)s)")
    add("--seed", type=reader(values.integer), default=0, metavar="N", help="of lengths (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from headrace.bench.inside import fragmentation

    shortest = fragmentation.LIMIT + fragmentation.PROMPT
    if not shortest <= args.max_model_len <= args.kv_tokens:
        raise ConfigError(f"--max-model-len must be from {shortest} to --kv-tokens ({args.kv_tokens}), not {args.max_model_len}.")
    if min(args.block_sizes) < 1 or max(args.block_sizes) > args.max_model_len:
        raise ConfigError(f"--block-sizes must be from 1 to --max-model-len ({args.max_model_len}).")
    results = []
    makers = list(fragmentation.layouts(args.kv_tokens, longest=args.max_model_len, block_sizes=args.block_sizes))
    with tqdm(total=2 * len(makers), desc="Memories", dynamic_ncols=True, file=sys.stderr, leave=False) as progress:
        for lengths in ("mixed", "uniform"):
            requests = fragmentation.requests_of(lengths, args.requests, longest=args.max_model_len, seed=args.seed)
            for name, make in makers:
                results.append({"lengths": lengths, "memory": name} | fragmentation.simulate(make(), requests))
                progress.update()
    print(fragmentation.table(results))
    if args.json is not None:
        head = {"format": "headrace-fragmentation-1", **provenance(), "kv_tokens": args.kv_tokens, "max_model_len": args.max_model_len}
        args.json.write_text(json.dumps(head | {"results": results}) + "\n")
        print(f"written: {args.json}")
    return 0
