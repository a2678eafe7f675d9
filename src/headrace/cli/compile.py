"""`headrace compile`: prepare a model's steps on a machine with a compiler, for machines without one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from headrace.cli.options import ENGINE_GROUPS, add_options
from headrace.cli.settings import engine_options, merge
from headrace.config import EngineConfig

EPILOG = """\
examples:
  headrace compile ./model.gguf -o ./compiled
  headrace serve ./model.gguf --artifacts ./compiled

Give the flags that the service will have: --max-num-seqs, --max-model-len, --block-size and --max-seq-len-to-capture make the shapes. With
--compile full, steps of more than 256 tokens are compiled too. The folder holds the packages, the CPU kernels and manifest.json, which says what they
were made for. Weights stay in the model's own files.
"""


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "compile",
        usage="headrace compile [MODEL] -o DIR [FLAGS]",
        help="compile a model's steps ahead of time",
        description="Compile a model's steps ahead of time, for `headrace serve --artifacts`.",
        epilog=EPILOG,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file, Hugging Face directory or hub name; default: SmolLM2-135M-Instruct")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="folder to write to")
    add_options(parser, ENGINE_GROUPS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = engine_options(merge(args, {}))
    EngineConfig(model="", **options)  # a wrong flag is said before a model is fetched
    from tqdm import tqdm

    from headrace.cli.sigterm import ended_by_sigterm
    from headrace.models import store
    from headrace.runner.artifact_build import build_artifacts

    config = EngineConfig(model=str(store.resolve_model(args.model)), **options)
    with ended_by_sigterm(), tqdm(total=None, desc="Compiling", unit="package", dynamic_ncols=True, file=sys.stderr) as bar:

        def progress(name: str, done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.set_postfix_str(name)

        built = build_artifacts(config, Path(args.output), progress)
        bar.total = bar.n = len(built.packages)
        bar.set_postfix_str("")
    size = f"{built.num_bytes / 2**20:.1f} MiB"
    print(f"{args.output}: {len(built.packages)} packages, {size}, {built.compilations} of them compiled now. Serve with --artifacts {args.output}.")
    return 0
