"""`headrace bench ladder`: from a naive server to all of Headrace, one measure at a time, on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.bench import ladder
from headrace.bench.figures import figures, useful_share
from headrace.bench.html_reports import ladder_page
from headrace.bench.ladder import Rung
from headrace.bench.load import Run, run_load
from headrace.bench.sse_client import Target
from headrace.bench.workload import BenchRequest, varied_requests
from headrace.cli import values
from headrace.cli.api_client import ApiClient
from headrace.cli.benches.pages import write_page
from headrace.cli.benches.processes import peak_memory
from headrace.cli.benches.provenance import load_average, provenance
from headrace.cli.benches.work import read_work, work_between
from headrace.cli.chat_client import ChatClient
from headrace.cli.local_server import free_port, server_process
from headrace.cli.options import reader
from headrace.errors import ConfigError

WARM_UP = 4  # requests at once, so that steps with several rows are warm as well
SEEDS = 3  # that a round uses
EPILOG = """\
examples:
  headrace bench ladder                                   the default model: all rungs, in some minutes
  headrace bench ladder --html ladder.html                and a report with plots
  headrace bench ladder ./model --clients 8 --rungs naive,continuous,prefix-cache

The lower rungs are a small server that comes with Headrace (python -m headrace.bench.rungs) and computes with the same weights, dtype and kernels;
the upper ones are Headrace itself. Each rung is a process of its own with the same load over HTTP: a closed loop of clients, then requests one
after the other that begin with the same long context. All rungs are visited in each round, in one round upwards and in the next downwards; figures
are the medians of the rounds.
"""


def add_actions(actions: Any) -> None:
    parser: argparse.ArgumentParser = actions.add_parser(
        "ladder",
        usage="headrace bench ladder [MODEL] [FLAGS]",
        help="from a naive server up, one measure at a time",
        description="From a naive server to all of Headrace, one measure at a time: what each brings on this machine.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="GGUF file, Hugging Face directory or hub name; default: SmolLM2-135M-Instruct")
    add("--rungs", metavar="NAME,NAME", help="only these: naive, dynamic, dynamic-reuse, continuous, prefix-cache, quantized (default: all)")
    add("--clients", type=reader(values.positive_integer), default=32, metavar="N", help="that ask at the same time (default: %(default)s)")
    add("--num-prompts", type=reader(values.positive_integer), default=48, metavar="N", help="requests of them in a round (default: %(default)s)")
    add("--rounds", type=reader(values.positive_integer), default=3, metavar="N", help="of all rungs (default: %(default)s)")
    add(
        "--time-budget",
        type=reader(values.duration),
        default=570.0,
        metavar="TIME",
        help="no round begins that would probably end later, but for the first: 90s, 10m (default: 570s)",
    )
    add("--input-len", type=reader(values.positive_integer), default=48, metavar="N", help="median words of a prompt (default: %(default)s)")
    add("--output-len", type=reader(values.positive_integer), default=24, metavar="N", help="median tokens of an answer (default: %(default)s)")
    add("--shared-context", type=reader(values.positive_integer), default=2000, metavar="N", help="words that some prompts share (default: 2000)")
    add("--shared-requests", type=reader(values.positive_integer), default=2, metavar="N", help="in a round that find it (default: %(default)s)")
    add("--seed", type=reader(values.integer), default=0, metavar="N", help="of prompts and lengths (default: 0)")
    add("--dtype", type=reader(values.dtype), metavar="TYPE", help="of all rungs (default: float32 on CPU, the checkpoint's on CUDA)")
    add("--device", type=reader(values.device), default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--threads", type=reader(values.positive_integer), metavar="N", help="compute threads (default: one per physical core)")
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    add("--html", type=Path, metavar="FILE", help="write a report with plots, one file that needs no other")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from headrace.models.loader import find_gguf
    from headrace.models.store import resolve_model
    from headrace.runner.device import resolve_device

    on_cpu = resolve_device(args.device).type == "cpu"
    model = resolve_model(args.model)
    quantization = None if not on_cpu else "gguf" if find_gguf(model) else "int8"
    common = ["--dtype", args.dtype or ("float32" if on_cpu else "auto"), "--device", args.device]
    common += ["--threads", str(args.threads)] if args.threads else []
    available = ladder.rungs(common=common, clients=args.clients, quantization=quantization)
    try:
        rungs = available if args.rungs is None else ladder.chosen(available, values.listed(args.rungs, str))
    except ValueError as error:
        raise ConfigError(f"--rungs: {error}.") from None
    result = {"format": ladder.FORMAT, **provenance(), "model": model.name, "load_average": load_average(), "load": _load_words(args)}
    begin = time.monotonic()
    rounds = _rounds(rungs, model, args, end=begin + args.time_budget)
    result["rungs"] = ladder.with_ratios([ladder.joined([one[rung.name] for one in rounds]) for rung in rungs])
    result["duration"] = time.monotonic() - begin
    result["caveats"] = _caveats(args, result["load_average"], len(rounds))
    print(ladder.table(result["rungs"]))
    print(f"{len(rounds)} round{'s' * (len(rounds) != 1)} in {result['duration']:.0f} s")
    for caveat in result["caveats"]:
        print(f"note: {caveat}")
    if args.json is not None:
        args.json.write_text(json.dumps(result) + "\n")
        print(f"written: {args.json}")
    if args.html is not None:
        write_page(args.html, ladder_page(result))
    return int(any(rung["figures"]["failed"] or rung["shared_context"]["errors"] for rung in result["rungs"]))


def _rounds(rungs: Sequence[Rung], model: Path, args: argparse.Namespace, *, end: float) -> list[dict[str, dict[str, Any]]]:
    """Results of each round by the rung's name. `end`: monotonic seconds, see --time-budget."""
    rounds: list[dict[str, dict[str, Any]]] = []
    longest = 0.0
    for number in range(args.rounds):
        begin = time.monotonic()
        if rounds and begin + longest > end:
            break
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
        order = rungs if number % 2 == 0 else rungs[::-1]  # whatever drifts falls on both ends alike
        rounds.append({rung.name: _measure(rung, model, args, number) for rung in order})
        longest = max(longest, time.monotonic() - begin)
    return rounds


def _measure(rung: Rung, model: Path, args: argparse.Namespace, number: int) -> dict[str, Any]:
    """`number`: of the round, which has prompts of its own."""
    from headrace.engine.engine_process import child_environment

    key, port = secrets.token_hex(16), free_port()
    url = f"http://127.0.0.1:{port}"
    module = ["headrace", "serve"] if rung.server == "headrace" else ["headrace.bench.rungs"]
    command = [sys.executable, "-m", *module, str(model), *rung.flags, "--port", str(port)]
    environment = child_environment() | {"HEADRACE_API_KEY": key}
    client, api = ChatClient(url, api_key=key), ApiClient(url, api_key=key)
    begin = time.monotonic()
    print(f"{rung.title}: starting", file=sys.stderr)
    with server_process(command, environment=environment, client=client) as process:
        start_seconds = time.monotonic() - begin
        target, name = Target(url, api_key=key), client.model()
        seed = args.seed + number * SEEDS
        load = varied_requests(args.num_prompts, input_len=args.input_len, output_len=args.output_len, seed=seed)
        warm = varied_requests(WARM_UP, input_len=args.input_len, output_len=8, seed=seed + 1)
        asyncio.run(_run(target, warm, name, WARM_UP, "warm-up"))
        before = read_work(api)
        loaded = asyncio.run(_run(target, load, name, args.clients, rung.title))
        after = read_work(api)
        shared = ladder.shared_context_requests(1 + args.shared_requests, words=args.shared_context, seed=seed + 2)
        probed = asyncio.run(_run(target, shared, name, 1, f"{rung.title}, shared context"))
        memory = peak_memory(process.pid)
    for error in sorted({record.error for record in (*loaded.records, *probed.records) if record.error})[:3]:
        print(f"{rung.title}: failed: {error}", file=sys.stderr)
    work = work_between(before, after)
    return {
        "name": rung.name,
        "title": rung.title,
        "base": rung.base,
        "words": rung.words,
        "command": shlex.join(["python", "-m", *module, model.name, *rung.flags]),
        "start_seconds": start_seconds,
        "figures": figures(loaded),
        "shared_context": ladder.shared_context_figures(probed),
        "work": work,
        "useful_share": useful_share(work),
        "peak_memory_bytes": memory,
    }


async def _run(target: Target, requests: Sequence[BenchRequest], model: str, clients: int, title: str) -> Run:
    from tqdm import tqdm

    with tqdm(total=len(requests), desc=title, unit="request", dynamic_ncols=True, file=sys.stderr, leave=False) as progress:
        return await run_load(
            target,
            requests,
            [0.0] * len(requests),
            model=model,
            max_concurrency=clients,
            extra={"temperature": 0.0, "ignore_eos": True},
            on_end=lambda record: progress.update() and None,
        )


def _load_words(args: argparse.Namespace) -> str:
    return (
        f"in each round {args.num_prompts} requests from {args.clients} clients in a closed loop, prompts around {args.input_len} words and answers "
        f"around {args.output_len} tokens (medians; lognormal, up to four times as long); then {1 + args.shared_requests} requests one after "
        f"the other that share {args.shared_context:,} words"
    )


def _caveats(args: argparse.Namespace, load_average: float | None, rounds: int) -> list[str]:
    found = [
        "In a round rungs ran one after the other: where the spread is wide, the machine's speed drifted, and a ratio is as uncertain as that.",
        f"P99 of {args.num_prompts} requests is nearly the slowest of them.",
        "The small server is kind to the lower rungs: it computes with Headrace's weights, dtype and kernels, and does not pad prompts.",
    ]
    if rounds < args.rounds:
        found.append(f"Only {rounds} of {args.rounds} rounds fitted into --time-budget.")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if load_average is not None and load_average > cpus / 4:
        found.append(f"Other work was on the machine: {load_average:.1f} runnable processes on {cpus} CPUs in the minute before the run.")
    return found
