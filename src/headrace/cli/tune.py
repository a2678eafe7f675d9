"""`headrace tune`: measures settings on this machine with this model and load, and writes the best ones as a config file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.traces import Trace
from headrace.cli import tune_axes, values
from headrace.cli.benches.provenance import provenance
from headrace.cli.config_text import config_text
from headrace.cli.options import ENGINE_GROUPS, add_options, reader
from headrace.cli.settings import MODEL_KEY, merge, read_config_file
from headrace.cli.trace_flags import add_part, read_sent_trace
from headrace.cli.tune_trial import Trials
from headrace.errors import ConfigError, StartError
from headrace.plan.search import OutOfTime, search
from headrace.plan.slo import parse_slo
from headrace.plan.tune_page import tune_page
from headrace.plan.tuning import TrialBook, TrialResult, best_start, race, report

DEFAULT_TRACE = "burst:prompt=128,output=64,requests=64,sigma=0.5"
EPILOG = """\
examples:
  headrace tune --slo p95_ttft=2s,p95_itl=150ms --trace poisson:rate=2,prompt=128,output=64,requests=100
  headrace tune owner/model --trace requests.jsonl --num-requests 200 --slo p95_e2el=20s --time-budget 30m
  headrace tune --search max-num-seqs=4,8,16,32 --search threads=1,2 --time-budget 5m
  headrace serve --config tuned.yaml

Each trial starts a server with some settings, sends it the trace over HTTP and stops it. A trial's score is its requests per second; a missed limit
of --slo divides it by how much longer than allowed was taken, kept ones add up to a fifth by the room they leave. Without --trace 64 requests come at
once. What was tried is kept in --state: the same command goes on where it was stopped.
"""


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "tune",
        usage="headrace tune [MODEL] [FLAGS]",
        help="measure the best settings for a load",
        description="Tries settings on this machine, each with a server of its own under the load, and writes the best as a config file.",
        epilog=EPILOG,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file, Hugging Face directory or hub name; default: SmolLM2-135M-Instruct")
    add = parser.add_argument
    add("--slo", type=reader(parse_slo), default=(), metavar="LIMITS", help="limits such as p95_ttft=300ms,p95_itl=50ms, as of `headrace plan`")
    add("--trace", default=DEFAULT_TRACE, metavar="TRACE", help="the load, as of `headrace plan` (default: %(default)s)")
    add_part(add)
    add(
        "--time-budget",
        type=reader(values.duration),
        default=600.0,
        metavar="TIME",
        help="when all is to be over: 90s, 10m (default: 10m)",
    )
    add(
        "--search",
        action="append",
        type=reader(tune_axes.parse_axis),
        default=[],
        metavar="FLAG=V,V",
        help="values of a flag of `headrace serve` to try, `default` among them for none; may be given again; default: see the docs",
    )
    add("--output", type=Path, default=Path("tuned.yaml"), metavar="FILE", help="where the best settings go (default: %(default)s)")
    add("--state", type=Path, default=Path("tune-trials.json"), metavar="FILE", help="where the trials are kept (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add("--html", type=Path, metavar="FILE", help="write the report as one HTML file with plots")
    add("--config", metavar="FILE", help="YAML file of `headrace serve` with settings that stay; flags on the command line win over it")
    add_options(parser, ENGINE_GROUPS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    end = time.monotonic() + args.time_budget
    trace = read_sent_trace(args, args.num_requests)
    if not args.slo and trace.seconds:
        raise ConfigError("--slo is needed: at a given rate of requests every setting that keeps up is as good as another.")
    file = read_config_file(args.config) if args.config else {}
    model = args.model or file.pop(MODEL_KEY, None)
    fixed = tune_axes.plain(merge(args, file))
    axes = tune_axes.merged(args.search) or tune_axes.default_axes(args.slo)
    axes = [axis for axis in axes if axis.name not in fixed]
    if not axes:
        raise ConfigError("There is nothing to search: every flag of --search is given on the command line or in --config.")
    book = TrialBook(args.state, _subject(model, trace, args, fixed))
    with Trials(model, trace, args.slo, fixed, book, end=end) as trials:
        default = {axis.name: tune_axes.start_value(axis) for axis in axes}
        starts = [default]
        if not trials.is_valid(default):
            raise ConfigError("--search: the first values do not go together: " + ", ".join(f"{name} {value}" for name, value in default.items()))
        if book.find(default) is None:
            trials.score(default, 0.0)
        expected = trials.expectation()
        if expected is not None:
            trials.bar.set_description("simulating")
            starts.append(best_start(axes, default, expected, simulated=tune_axes.SIMULATED))
        starts += [trial.settings for trial in tune_axes.of_axes(book.trials, axes)]  # of a search that was stopped: they cost no time
        found = search(axes, starts, trials.score, is_valid=trials.is_valid)
        with contextlib.suppress(OutOfTime):
            race(tune_axes.of_axes(book.trials, axes), trials.again)
    tried = tune_axes.of_axes(book.trials, axes)
    best = max((trial for trial in tried if trial.runs > 1), key=lambda trial: trial.score, default=book.find(found))
    if best is None or best.error is not None:
        raise StartError(f"No server serves with these settings: {best.error if best else 'there was no time for a trial'}")
    print(report(axes, best, tried, args.slo))
    _write(args, model, fixed, best, tried)
    if args.html is not None:
        args.html.write_text(tune_page(axes, best, tried, args.slo, provenance()), encoding="utf-8")
        print(f"written: {args.html}")
    return 0


def _subject(model: str | None, trace: Trace, args: argparse.Namespace, fixed: Mapping[str, Any]) -> dict[str, Any]:
    from headrace.models.store import DEFAULT_MODEL

    return {
        "model": model or DEFAULT_MODEL,
        "machine": provenance()["machine"],
        "trace": [args.trace, len(trace.requests), args.speed],
        "slo": [str(limit) for limit in args.slo],
        "flags": dict(fixed),
    }


def _write(args: argparse.Namespace, model: str | None, fixed: Mapping[str, Any], best: TrialResult, tried: Sequence[TrialResult]) -> None:
    facts = provenance()
    chosen = {name: value for name, value in best.settings.items() if value is not None}
    settings = ({MODEL_KEY: model} if model else {}) | dict(fixed) | chosen
    limits = ", ".join(map(str, args.slo)) or "throughput"
    head = f"Measured by `{facts['command']}`\non {facts['machine']}, {facts['date']}; for {limits}: score {best.score:.3f}."
    args.output.write_text(config_text(settings, head=head), encoding="utf-8")
    print(f"written: {args.output}; use it with: headrace serve --config {args.output}")
    if args.json is not None:
        found = {"object": "tune", **facts, "slo": [str(limit) for limit in args.slo], "best": dataclasses.asdict(best)}
        args.json.write_text(json.dumps(found | {"trials": [dataclasses.asdict(trial) for trial in tried]}, indent=1) + "\n", encoding="utf-8")
        print(f"written: {args.json}")
