#!/usr/bin/env python3
"""How near `headrace plan` comes to a real run: a server of its own is measured, loaded with traces, and the same traces are simulated.

    python scripts/plan_accuracy.py
    python scripts/plan_accuracy.py --trace poisson:rate=1,prompt=256,output=32,requests=400,sigma=0.5 --save accuracy.json -- --max-num-seqs 16

Three loads: the trace at so many times (`--loads`) the rate that the simulation says the machine can just keep up with, each for `--seconds` of
arrivals. Steps are measured before each load and after the last one; a load is planned with those of the two times around it, so that a machine which
is faster at one time than at another is so for both sides. Figures of both and their ratio are printed, and beside them what the simulation makes of
the steps that were timed in that very run: the difference between the two is how much the machine changed in between. The simulated figures are the
medians over `--seeds` of the noise. What stands after `--` are flags of `headrace serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from own_server import own_server
from plain_http import get_text

from headrace.bench.figures import figures
from headrace.bench.load import Run, run_load
from headrace.bench.sse_client import Target
from headrace.bench.traces import Trace, bench_request, load_trace
from headrace.cli.api_client import ApiClient
from headrace.cli.options import SERVE_GROUPS, add_options
from headrace.cli.plan_engine import described, prompts, simulated
from headrace.cli.settings import merge
from headrace.plan.costs import Costs, Measured, Sample, fit
from headrace.plan.fleet import Engine, replay
from headrace.plan.measure import Recording, delays_of, handoffs, levels, measure, samples_of
from headrace.plan.simulator import Delays

TRACE = "poisson:rate=1,prompt=96,output=40,requests=2000,sigma=0.6"
MOST_RECORDED_S = 60.0
SHOWN = (
    ("request_throughput", "requests/s"),
    ("output_throughput", "output tokens/s"),
    ("median_ttft_ms", "TTFT p50, ms"),
    ("p95_ttft_ms", "TTFT p95, ms"),
    ("median_itl_ms", "ITL p50, ms"),
    ("p95_itl_ms", "ITL p95, ms"),
    ("median_e2el_ms", "E2EL p50, ms"),
    ("p95_e2el_ms", "E2EL p95, ms"),
)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    trace = load_trace(args.trace)
    settings = merge(args.flags, {})
    with own_server(args.serve) as server:
        target, api = Target(server.url), ApiClient(server.url)
        record = lambda seconds: api.call("POST", f"/debug/trace?seconds={seconds:g}")  # noqa: E731
        model = json.loads(get_text(server.url, "/v1/models"))["data"][0]["id"]
        words, clients = prompts(trace), levels(int(settings.get("max-num-seqs", 64)))

        def measured() -> Measured:
            found = measure(target, record, words, model=model, clients=clients, level_s=args.level_seconds)
            return described(found, api.call("GET", "/v1/status"), model=model, flags=tuple(args.serve), settings=settings)

        found = [measured()]
        burst = Trace(name="all at once", requests=tuple(dataclasses.replace(request, arrival=0.0) for request in trace.requests[:200]))
        full = replay(burst, simulated(found[0], trace, settings), 1)
        assert full is not None
        capacity = full.figures()["request_throughput"]
        print(f"{found[0].machine}: {capacity:.2f} requests/s when all come at once", flush=True)
        loads: list[tuple[Trace, Run, Recording]] = []
        for number, load in enumerate(args.loads):
            part = scaled(trace, load * capacity, args.seconds)
            loads.append((part, *asyncio.run(_run(target, part, model, record, seed=7 + number))))
            found.append(measured())
    print("steps of each time took, of all: " + ", ".join(f"{drift(one.samples, joined(found).samples):.3f}" for one in found))
    saved: list[dict[str, Any]] = []
    for load, around, (part, run, recording) in zip(args.loads, itertools.pairwise(found), loads, strict=True):
        real, own, together = figures(run), samples_of(recording), joined(around)
        planned = dataclasses.replace(simulated(together, part, settings), known=around[0].samples)  # what the server has seen last
        ahead, token, behind = delays_of([recording], run.records)
        fitted = fit(own)
        delays = Delays(handoff=statistics.median(handoffs(recording)), before=ahead, before_token=token, after=behind, cold=fitted.cold)
        with_own_steps = dataclasses.replace(planned, costs=fitted.with_noise, delays=delays)
        simulations = [simulated_figures(part, engine, args.seeds) for engine in (planned, with_own_steps)]
        print(f"steps took {drift(own, together.samples):.3f} times as long as the {len(together.samples)} measured ones of their size")
        print(table(f"{load:g} x, {len(part.requests)} requests in {part.seconds:.0f} s", real, *simulations), flush=True)
        entry = {"load": load, "real": real, "planned": simulations[0], "with_own_steps": simulations[1], "trace": dataclasses.asdict(part)}
        entry["records"] = [dataclasses.asdict(each) | {"text": ""} for each in run.records]
        entry["steps"] = [sample.work._asdict() | {"seconds": sample.seconds, "idle": sample.idle} for sample in own]
        saved.append(entry)
    if args.save:
        joined(found).write(args.save.with_suffix(".costs.json"))
        args.save.write_text(json.dumps(saved))
    return 0


def simulated_figures(trace: Trace, engine: Engine, seeds: int) -> dict[str, float]:
    """What is shown: of each figure the median over the seeds."""
    fleets = [replay(trace, dataclasses.replace(engine, costs=functools.partial(_with_seed, engine, seed)), 1) for seed in range(seeds)]
    found = [fleet.figures() for fleet in fleets if fleet is not None]
    return {key: statistics.median(each[key] for each in found) for key, _ in SHOWN}


def _with_seed(engine: Engine, seed: int, number: int) -> Costs:
    return engine.costs(seed + number)


def joined(found: Sequence[Measured]) -> Measured:
    """All measurements of one server as one."""
    delays = {name: statistics.fmean(getattr(one, name) for one in found) for name in ("handoff_s", "before_s", "before_token_s", "after_s")}
    return dataclasses.replace(found[0], samples=tuple(sample for one in found for sample in one.samples), **delays)


def drift(samples: Sequence[Sample], others: Sequence[Sample]) -> float:
    """How many times as long these steps took as others of their size."""
    fitted = fit(others, noise=None)
    return sum(sample.seconds for sample in samples) / sum(fitted.seconds(sample.work) + fitted.cold(sample.idle) for sample in samples)


def scaled(trace: Trace, rate: float, seconds: float) -> Trace:
    """The trace at so many requests a second, as far as it goes in that time."""
    faster = trace.faster(rate * trace.seconds / len(trace.requests))
    return dataclasses.replace(faster, requests=tuple(request for request in faster.requests if request.arrival < seconds))


async def _run(target: Target, trace: Trace, model: str, record: Callable[[float], Recording], *, seed: int) -> tuple[Run, Recording]:
    """The load, and what the server recorded of it. `seed`: of the words, which the prefix cache must not have seen."""
    recorder = asyncio.create_task(asyncio.to_thread(record, min(MOST_RECORDED_S, trace.seconds)))
    requests = [bench_request(request, number, seed=seed) for number, request in enumerate(trace.requests)]
    moments = [request.arrival for request in trace.requests]
    run = await run_load(target, requests, moments, model=model, extra={"temperature": 0.0, "ignore_eos": True})
    return run, await recorder


def table(head: str, real: dict[str, Any], planned: dict[str, Any], own: dict[str, Any]) -> str:
    lines = [f"{head:<40}{'real':>10}{'planned':>10}{'ratio':>8}{'own steps':>11}{'ratio':>8}"]
    for key, words in SHOWN:
        least = max(real[key], 1e-9)
        lines.append(f"  {words:<38}{real[key]:>10.2f}{planned[key]:>10.2f}{planned[key] / least:>8.3f}{own[key]:>11.2f}{own[key] / least:>8.3f}")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else arguments
    own, serve = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", default=TRACE, help="whose lengths and gaps are used (default: %(default)s)")
    loads = {"type": lambda text: [float(part) for part in text.split(",")], "default": [0.4, 0.85, 1.5]}
    parser.add_argument("--loads", **loads, metavar="X,X", help="times what the machine just keeps up with (default: 0.4,0.85,1.5)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each load (default: 40)")
    parser.add_argument("--level-seconds", type=float, default=2.0, help="of each number of clients that steps are measured with (default: 2)")
    parser.add_argument("--seeds", type=int, default=5, help="of the simulation's noise (default: 5)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="all figures and records as JSON, and beside it the measured steps")
    args = parser.parse_args(own)
    args.serve = serve
    flags = argparse.ArgumentParser(prog="plan_accuracy.py -- ...")
    add_options(flags, SERVE_GROUPS)
    args.flags = flags.parse_args(serve)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
