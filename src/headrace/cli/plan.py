"""`headrace plan`: how many of which device for a load and its limits, by replaying a trace through the scheduler itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.cli import plan_engine, values
from headrace.cli.options import MEMORY_OPTIONS, MODEL_OPTIONS, SCHEDULER_OPTIONS, add_options, reader
from headrace.cli.settings import merge, read_config_file
from headrace.cli.trace_flags import add_part, read_trace
from headrace.plan.devices import DEVICES
from headrace.plan.fleet import replay, replicas_needed
from headrace.plan.report import answer, text
from headrace.plan.slo import parse_slo

HERE = "here"
EPILOG = """\
examples:
  headrace plan --trace poisson:rate=4,prompt=256,output=64 --slo p95_ttft=2s,p95_itl=150ms
  headrace plan --trace requests.jsonl --step-costs costs.json --slo p95_e2el=20s --price 0.08
  headrace plan --trace AzureLLMInferenceTrace_conv.csv --model owner/model --device h100 --slo p95_ttft=500ms,p95_itl=50ms --price 2.5
  headrace plan --trace BurstGPT_1.csv --num-requests 10000 --speed 2 --replicas 4 --json

A trace is a file of JSON lines (arrival in seconds, prompt_tokens, output_tokens, and where it has them prefix, prefix_tokens, tenant), a CSV
file with the columns of the Azure LLM traces or of BurstGPT, or made up: poisson:rate=,prompt=,output=[,requests=,sigma=,prefix=,burstiness=,
seed=], or burst:prompt=,output= with all requests at once.

--device here measures this machine's steps with a server of its own, in about a minute, and --step-costs FILE keeps what was measured: the next
plan reads it. Other devices are computed from what is published of them; the assumptions are printed.
Exit status: 0 the limits are kept, 1 they are not.
"""


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "plan",
        help="how many of which device a load needs",
        description="Replays a trace through the scheduler without a model: engines needed, latencies, KV blocks, cost.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--trace", required=True, metavar="TRACE", help="file, or a made-up one: see below")
    add("--model", metavar="MODEL", help="GGUF file, Hugging Face directory or hub name; default: SmolLM2-135M-Instruct")
    add(
        "--device",
        dest="planned_device",
        choices=(HERE, *DEVICES),
        default=HERE,
        metavar="DEVICE",
        help=f"here: this machine, measured; or one of {', '.join(DEVICES)} (default: %(default)s)",
    )
    add(
        "--slo",
        type=reader(parse_slo),
        default=(),
        metavar="LIMITS",
        help="limits such as p95_ttft=300ms,p95_itl=50ms: pN, mean or median of ttft, tpot, itl, e2el",
    )
    add("--replicas", type=reader(values.positive_integer), metavar="N", help="so many engines; default: the fewest that keep --slo, or 1 without")
    add("--step-costs", type=Path, metavar="FILE", help="measured steps: read if it is there, else measured and written")
    add_part(add)
    add("--price", type=reader(values.positive_number), metavar="X", help="of one engine's device for an hour")
    add("--json", action="store_true", help="the answer as a JSON object")
    add("--config", metavar="FILE", help="YAML file of `headrace serve`; flags on the command line win over it")
    model_options = tuple(option for option in MODEL_OPTIONS if option.flag != "device")
    add_options(parser, (("model", model_options), ("memory", MEMORY_OPTIONS), ("scheduler", SCHEDULER_OPTIONS)))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    trace = read_trace(args, args.num_requests)
    file = read_config_file(args.config) if args.config else {}
    model = args.model or file.pop("model", None)
    settings = merge(args, file)
    if args.planned_device == HERE:
        engine, assumptions = plan_engine.measured(trace, model, settings, args.step_costs)
    else:
        engine, assumptions = plan_engine.published(trace, model, settings, args.planned_device)
    tried: list[int] = []
    with _progress(len(trace.requests)) as on_try:

        def counted(replicas: int) -> Callable[[], None]:
            tried.append(replicas)
            return on_try(replicas)

        if args.replicas or not args.slo:
            count = args.replicas or 1
            fleet = replay(trace, engine, count, limits=args.slo, on_end=counted(count))
        else:
            fleet = replicas_needed(trace, engine, args.slo, on_try=counted)
    found = answer(trace, fleet, args.slo, assumptions=assumptions, price=args.price, tried=tried)
    print(json.dumps(found, indent=2) if args.json else text(found))
    return int(fleet is None or bool(args.slo and (fleet.missed or fleet.failed)))


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[int], Callable[[], None]]]:
    """Gives what is told each size of a fleet that is tried, and returns what is called when a request ends."""
    from tqdm import tqdm

    with tqdm(total=count, unit="request", dynamic_ncols=True, file=sys.stderr, leave=False) as bar:

        def on_try(replicas: int) -> Callable[[], None]:
            bar.reset(total=count)
            bar.set_description(f"{replicas} engine{'s' * (replicas != 1)}")
            return lambda: bar.update() and None

        yield on_try
