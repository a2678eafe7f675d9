"""`headrace bench eager-vs-compiled`: what `torch.compile` brings on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.cli import values
from headrace.cli.benches.provenance import provenance
from headrace.cli.options import reader
from headrace.errors import ConfigError, StartError

WORKLOADS = ("decode", "prefill", "resnet50", "vit-large")
DTYPES = ("float32", "bfloat16", "float16")
EPILOG = """\
examples:
  headrace bench eager-vs-compiled
  headrace bench eager-vs-compiled --workloads decode,prefill --dtypes float32
  headrace bench eager-vs-compiled ./model --workloads decode --rows 1

decode and prefill compute a language model in torch's own operators over a contiguous cache, not by Headrace's kernels; resnet50 and vit-large are
transformers' with random weights (headrace[vision]). Each one runs in a process of its own: eagerly, then compiled as one graph of static shapes.
"""


def add_actions(actions: Any) -> None:
    parser: argparse.ArgumentParser = actions.add_parser(
        "eager-vs-compiled",
        usage="headrace bench eager-vs-compiled [MODEL] [FLAGS]",
        help="torch eagerly against torch.compile",
        description="torch eagerly against torch.compile: latency, throughput and peak memory of language and image models.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="of decode and prefill: GGUF file, Hugging Face directory or hub name; default: SmolLM2-135M-Instruct",
    )
    add("--workloads", type=reader(one_of(WORKLOADS)), default=WORKLOADS, metavar="NAME,NAME", help=f"(default: {','.join(WORKLOADS)})")
    add("--dtypes", type=reader(one_of(DTYPES)), default=DTYPES[:2], metavar="TYPE,TYPE", help="(default: float32,bfloat16)")
    add("--rows", type=reader(values.positive_integer), default=8, metavar="N", help="requests that decode (default: %(default)s)")
    add("--context", type=reader(values.positive_integer), default=256, metavar="N", help="tokens behind each of them (default: %(default)s)")
    add("--prompt-tokens", type=reader(values.positive_integer), default=256, metavar="N", help="of prefill (default: %(default)s)")
    add("--images", type=reader(values.positive_integer), default=4, metavar="N", help="in a batch (default: %(default)s)")
    add("--repeats", type=reader(values.positive_integer), default=10, metavar="N", help="measured calls (default: %(default)s)")
    add("--device", type=reader(values.device), default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--threads", type=reader(values.positive_integer), metavar="N", help="compute threads (default: torch's)")
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.set_defaults(run=run)


def one_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads names between commas."""

    def read(text: str) -> tuple[str, ...]:
        names = values.listed(text, str)
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{unknown[0]} is not known; use {', '.join(known)}")
        return names

    return read


def run(args: argparse.Namespace) -> int:
    if any(name in args.workloads for name in ("resnet50", "vit-large")) and importlib.util.find_spec("transformers") is None:
        raise ConfigError("--workloads: resnet50 and vit-large need transformers: pip install 'headrace[vision]', or use --workloads decode,prefill.")
    from tqdm import tqdm

    from headrace.models.store import resolve_model
    from headrace.runner.device import resolve_device

    model = str(resolve_model(args.model)) if {"decode", "prefill"} & set(args.workloads) else None
    common = {"model": model, "device": str(resolve_device(args.device)), "threads": args.threads}
    common |= {name: getattr(args, name) for name in ("rows", "context", "prompt_tokens", "images", "repeats")}
    kinds = list(itertools.product(args.workloads, args.dtypes, (False, True)))
    results = []
    with tqdm(kinds, desc="Workloads", dynamic_ncols=True, file=sys.stderr) as progress:
        for workload, dtype, compiled in progress:
            progress.set_postfix_str(f"{workload} {dtype} {'compiled' if compiled else 'eager'}")
            spec = common | {"workload": workload, "dtype": dtype, "compiled": compiled}
            results.append({"workload": workload, "dtype": dtype, "compiled": compiled} | measured(spec))
    print(table(results))
    if args.json is not None:
        args.json.write_text(json.dumps({"format": "headrace-eager-compiled-1", **provenance(), **common, "results": results}) + "\n")
        print(f"written: {args.json}")
    return 0


def measured(spec: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own says of a spec. Raises `StartError` with its last words."""
    from headrace.engine.engine_process import child_environment

    command = [sys.executable, "-m", "headrace.bench.inside.eager_compiled", json.dumps(spec)]
    # threads that spin for long while they wait would measure other work on the machine
    done = subprocess.run(command, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartError(f"{spec['workload']} in {spec['dtype']} does not run: {done.stderr.strip()[-600:] or f'status {done.returncode}'}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """One line a workload and dtype: eager, compiled, and the ratio. `results`: in pairs, eager first."""
    units = {"decode": "tokens", "prefill": "tokens"}
    head = f"{'eager ms':>10}{'compiled':>10}{'x':>6}{'eager /s':>11}{'compiled /s':>13}{'eager MiB':>11}{'compiled':>10}{'first call s':>14}"
    lines = [f"{'workload':<11}{'dtype':<10}{head}"]
    for eager, compiled in zip(results[::2], results[1::2], strict=True):
        times = f"{eager['latency_ms']:>10.1f}{compiled['latency_ms']:>10.1f}{eager['latency_ms'] / compiled['latency_ms']:>6.2f}"
        rates = f"{eager['items_per_second']:>11.1f}{compiled['items_per_second']:>13.1f}"
        memory = f"{eager['peak_memory_bytes'] / 2**20:>11.0f}{compiled['peak_memory_bytes'] / 2**20:>10.0f}"
        unit = units.get(eager["workload"], "images")
        lines.append(f"{eager['workload']:<11}{eager['dtype']:<10}{times}{rates}{memory}{compiled['first_seconds']:>14.1f}  {eager['items']} {unit}")
    return "\n".join(lines)
