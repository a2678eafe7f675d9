"""`headrace bench step`: what one step takes, part by part."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headrace.cli import values
from headrace.cli.benches.provenance import provenance
from headrace.cli.options import ENGINE_GROUPS, add_options, reader
from headrace.cli.settings import engine_options, merge
from headrace.config import EngineConfig
from headrace.errors import ConfigError

EPILOG = """\
examples:
  headrace bench step                                     the default model, as `headrace serve` would run it here
  headrace bench step --rows 1,16 --contexts 256 --prompt-tokens 0,128 --json step.json
  headrace bench step ./model --quantization none --threads 1

Every combination of --rows, --contexts and --prompt-tokens is one shape: so many requests that decode, each with so many tokens behind it, and beside
them one chunk of a prompt. Parts that the engine does while the next step runs (plan, update, messages) are in the table, but not in `runner`.
"""


def add_actions(actions: Any) -> None:
    parser: argparse.ArgumentParser = actions.add_parser(
        "step",
        usage="headrace bench step [MODEL] [FLAGS]",
        help="one step's parts, for a grid of batches",
        description="What one step takes, part by part, for a grid of batches and prompt chunks, in this process.",
        epilog=EPILOG,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file, Hugging Face directory or hub name; default: SmolLM2-135M-Instruct")
    group = parser.add_argument_group("shapes")
    counts = reader(values.counts)
    group.add_argument("--rows", type=counts, default=(0, 1, 4, 16, 32), metavar="N,N", help="requests that decode (default: 0,1,4,16,32)")
    group.add_argument("--contexts", type=counts, default=(0, 128, 512, 1024), metavar="N,N", help="tokens before the step (default: 0,128,512,1024)")
    group.add_argument("--prompt-tokens", type=counts, default=(0, 32, 128, 512), metavar="N,N", help="tokens of a prompt (default: 0,32,128,512)")
    group.add_argument("--rounds", type=reader(values.positive_integer), default=3, metavar="N", help="visits of each shape (default: %(default)s)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all of it as JSON; the format is told in `headrace.bench.inside.step`")
    add_options(parser, ENGINE_GROUPS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from headrace.bench.inside import step  # not for those who only measure over HTTP: it imports the engine

    shapes = step.grid(args.rows, args.contexts, args.prompt_tokens)
    if not shapes:
        raise ConfigError("--rows, --contexts and --prompt-tokens make no step: rows that decode need a context, and something must be computed.")
    options = engine_options(merge(args, {}))
    options.setdefault("max_num_seqs", max(shape.rows for shape in shapes) + 1)
    options.setdefault("max_num_batched_tokens", max(2048, *(shape.tokens for shape in shapes)))
    EngineConfig(model="", **options)  # a wrong flag is said before a model is fetched
    from tqdm import tqdm

    from headrace.engine.async_llm import make_engine_config
    from headrace.runner.factory import make_runner

    config = make_engine_config(args.model, options)
    runner = make_runner(config)
    try:
        info = runner.info(0.0)
        misfits = {shape: reason for shape in shapes if (reason := step.misfit(shape, config, info)) is not None}
        fitting = [shape for shape in shapes if shape not in misfits]
        if not fitting:
            raise ConfigError(f"No shape fits: {next(iter(misfits.values()))}.")
        with tqdm(total=args.rounds * len(fitting), desc="Steps", unit="shape", dynamic_ncols=True, file=sys.stderr) as progress:
            step.blank(runner.caches, fitting, runner.block_size)
            points = step.measure(runner, fitting, rounds=args.rounds, on_visit=lambda: progress.update() and None)
    finally:
        runner.close()
    print(step.table(points))
    for shape, reason in misfits.items():
        print(f"left out: {shape.rows} rows at context {shape.context} beside {shape.prompt_tokens} prompt tokens: {reason}")
    if args.json is not None:
        head = {"format": step.FORMAT, **provenance(), "model": info.model, "engine": step.engine_facts(info)}
        skipped = [step.coordinates(shape) | {"reason": reason} for shape, reason in misfits.items()]
        args.json.write_text(json.dumps(head | {"points": points, "skipped": skipped}) + "\n")
        print(f"written: {args.json}")
    return 0
