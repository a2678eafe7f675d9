"""`headrace bench serve` and `bench compare`: load on any OpenAI-compatible server, measured from outside."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.figures import METRICS, details, figures, samples
from headrace.bench.html_reports import compare_page, serve_page
from headrace.bench.load import Run, run_load
from headrace.bench.report import comparison, sweep_table, table
from headrace.bench.sse_client import Target
from headrace.bench.traces import Trace, bench_request
from headrace.bench.workload import BenchRequest, arrivals, random_requests, read_requests, repeated
from headrace.cli import values
from headrace.cli.api_client import ApiClient
from headrace.cli.benches.pages import write_page
from headrace.cli.benches.provenance import provenance
from headrace.cli.benches.work import read_work, work_between
from headrace.cli.options import reader
from headrace.cli.trace_flags import add_speed, read_sent_trace
from headrace.errors import ConfigError, StartError

URL = "http://127.0.0.1:8000"
NUM_PROMPTS = 100
EPILOG = """\
examples:
  headrace bench serve                                         100 requests at once to http://127.0.0.1:8000
  headrace bench serve --request-rate 4 --num-prompts 200      a Poisson stream of 4 requests a second
  headrace bench serve --request-rate 1,2,4,8 --goodput ttft:500,tpot:50    up to the knee
  headrace bench serve --trace requests.jsonl --speed 2        arrivals and lengths of a trace, at twice its rate
  headrace bench serve --max-concurrency 16 --save-result      a closed loop of 16 clients, and a file of results
  headrace bench compare http://a:8000 http://b:8000           two servers in turn, and the ratios
"""


def add_actions(actions: Any) -> None:
    serve = actions.add_parser("serve", help="one server", description="One server: throughput and latencies under a load.", epilog=EPILOG)
    serve.add_argument("--base-url", metavar="URL", default=URL, help="where the server listens (default: %(default)s)")
    _add_load(serve)
    serve.add_argument("--save-result", action="store_true", help="write the figures to a file, by the names of `vllm bench serve`")
    serve.add_argument("--save-detailed", action="store_true", help="the same with every request's own figures and text")
    serve.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR", help="where to (default: here)")
    serve.add_argument("--result-filename", metavar="NAME", help="its name (default: of rate, model and time)")
    _add_html(serve)
    serve.set_defaults(run=run_serve)
    compare = actions.add_parser("compare", help="two servers in turn", description="Two servers in turn under the same load: ratios.", epilog=EPILOG)
    compare.add_argument("urls", nargs=2, metavar="URL", help="where they listen; ratios are the first to the second")
    compare.add_argument("--repeats", type=reader(values.positive_integer), default=3, metavar="N", help="rounds (default: %(default)s)")
    _add_load(compare)
    _add_html(compare)
    compare.set_defaults(run=run_compare)


def _add_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots, one file that needs no other")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add = group.add_argument
    add("--endpoint", default="/v1/completions", metavar="PATH", help="/v1/completions or /v1/chat/completions (default: %(default)s)")
    add("--model", metavar="NAME", help="model to ask for (default: the server's first)")
    add("--api-key", metavar="KEY", help="key of the server (default: $HEADRACE_API_KEY)")
    add("--num-prompts", type=reader(values.positive_integer), metavar="N", help="requests (default: 100, or all of --trace)")
    add("--trace", metavar="TRACE", help="arrivals and lengths, instead of a rate and --random-...: a file, or made up as for `headrace plan`")
    add_speed(add, "--trace")
    add(
        "--request-rate",
        type=reader(rates),
        default=(float("inf"),),
        metavar="RATE[,RATE...]",
        help="requests a second; several: one run each (default: inf, all at once)",
    )
    add(
        "--burstiness", type=reader(values.positive_number), default=1.0, metavar="X", help="1: Poisson; below: bursts; above: more even (default: 1)"
    )
    add("--max-concurrency", type=reader(values.positive_integer), metavar="N", help="most requests under way at once (default: no limit)")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow over the run")
    add("--ramp-up-start-rps", type=reader(values.positive_number), metavar="RATE", help="rate at its begin")
    add("--ramp-up-end-rps", type=reader(values.positive_number), metavar="RATE", help="rate at its end")
    add("--dataset-path", type=Path, metavar="FILE", help="prompts, one JSON object a line: prompt, output_tokens (default: random words)")
    add("--random-input-len", type=reader(values.positive_integer), default=128, metavar="N", help="words of a random prompt (default: %(default)s)")
    add("--random-output-len", type=reader(values.positive_integer), default=64, metavar="N", help="tokens of an answer (default: %(default)s)")
    add(
        "--random-range-ratio",
        type=reader(values.number),
        default=0.0,
        metavar="X",
        help="lengths are drawn within this share around theirs (default: 0)",
    )
    add("--random-prefix-len", type=reader(values.count), default=0, metavar="N", help="words that all random prompts begin with (default: 0)")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers have exactly their length; not every server knows the field",
    )
    add("--temperature", type=reader(values.number), default=0.0, metavar="T", help="(default: 0)")
    add("--extra-body", type=reader(json_object), default={}, metavar="JSON", help="fields for every request")
    add("--goodput", type=reader(goodput), default={}, metavar="METRIC:MS,...", help="limits that good requests keep: ttft, tpot, itl, e2el in ms")
    add("--metric-percentiles", type=reader(percentiles), default=(50.0, 90.0, 95.0, 99.0), metavar="P,P", help="(default: 50,90,95,99)")
    add(
        "--num-warmups", type=reader(values.count), default=1, metavar="N", help="requests before the run that are not counted (default: %(default)s)"
    )
    add("--seed", type=reader(values.integer), default=0, metavar="N", help="of prompts, lengths and arrivals (default: 0)")


def rates(text: str) -> tuple[float, ...]:
    found = values.listed(text, lambda part: float("inf") if part == "inf" else values.positive_number(part))
    if len(found) > 1 and float("inf") in found:
        raise ValueError("inf can't be one of several rates")
    return found


def percentiles(text: str) -> tuple[float, ...]:
    found = values.listed(text, values.positive_number)
    if max(found) > 100:
        raise ValueError("use numbers from 0 to 100")
    return tuple(sorted({*found, 95.0, 99.0}))


def goodput(text: str) -> dict[str, float]:
    limits = {}
    for part in text.replace(",", " ").split():
        name, _, limit = part.partition(":")
        if name not in METRICS:
            raise ValueError(f"use METRIC:MILLISECONDS with {', '.join(METRICS)}")
        limits[name] = values.positive_number(limit)
    return limits


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("use a JSON object")
    return value


def run_serve(args: argparse.Namespace) -> int:
    load = Load(args, args.base_url)
    results, seconds = [], []
    for rate in args.request_rate:
        run, last = load.run(rate)
        seconds.append(samples([record for record in run.records if record.ok]))
        found = load.figures(run, rate)
        results.append((rate, len(run.records), last, found))
        print(table(found))
        for error in sorted({record.error for record in run.records if record.error})[:3]:
            print(f"  failed: {error}")
        if args.save_result or args.save_detailed:
            path = args.result_dir / (_numbered(args.result_filename, len(results)) or _name(rate, load.model))
            path.write_text(json.dumps(found | (details(run) if args.save_detailed else {})) + "\n")
            print(f"written: {path}")
    if len(results) > 1:
        print(sweep_table(results))
    if args.html is not None:
        write_page(args.html, serve_page(results, seconds))
    return int(any(found["failed"] for *_, found in results))


def run_compare(args: argparse.Namespace) -> int:
    if len(args.request_rate) > 1:
        raise ConfigError("--request-rate: compare takes one rate.")
    loads = [Load(args, url) for url in args.urls]
    rounds: list[list[dict[str, Any]]] = [[], []]
    for number in range(args.repeats):
        order = (0, 1) if number % 2 == 0 else (1, 0)  # whatever drifts falls on both alike
        for which in order:
            run, _ = loads[which].run(args.request_rate[0])
            rounds[which].append(loads[which].figures(run, args.request_rate[0]))
    print(comparison(rounds))
    if args.html is not None:
        write_page(args.html, compare_page(rounds))
    return int(any(found["failed"] for side in rounds for found in side))


class Load:
    """The load that the flags describe, on one server."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        if args.ramp_up_strategy and not (args.ramp_up_start_rps and args.ramp_up_end_rps):
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
        key = args.api_key or os.environ.get("HEADRACE_API_KEY")
        self._args, self._url = args, url
        self._trace = None if args.trace is None else _trace(args)
        if self._trace is None and args.speed != 1.0:
            raise ConfigError("--speed is of a --trace; without one give --request-rate.")
        self._target = Target(url, endpoint=args.endpoint, api_key=key)
        self._api = ApiClient(url, api_key=key, timeout=30.0)
        self._work: dict[str, float] | None = None  # where the server's time went during the latest run
        self.model = args.model or _first_model(self._api, url)

    def run(self, rate: float) -> tuple[Run, float]:
        """The run, and the moment of the last arrival."""
        args = self._args
        requests = self._requests()
        if self._trace is not None:
            moments = [request.arrival for request in self._trace.requests]
            return asyncio.run(self._measure(requests, moments)), moments[-1]
        moments = arrivals(
            len(requests),
            rate=rate,
            burstiness=args.burstiness,
            seed=args.seed,
            ramp_up=args.ramp_up_strategy,
            start_rate=args.ramp_up_start_rps or 0.0,
            end_rate=args.ramp_up_end_rps or 0.0,
        )
        return asyncio.run(self._measure(requests, moments)), moments[-1]

    def _requests(self) -> list[BenchRequest]:
        args = self._args
        if self._trace is not None:
            return [bench_request(request, number, seed=args.seed) for number, request in enumerate(self._trace.requests)]
        if args.dataset_path is not None:
            return list(repeated(read_requests(args.dataset_path, output_len=args.random_output_len), args.num_prompts or NUM_PROMPTS))
        return random_requests(
            args.num_prompts or NUM_PROMPTS,
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            seed=args.seed,
        )

    async def _measure(self, requests: list[BenchRequest], moments: list[float]) -> Run:
        from tqdm import tqdm

        args = self._args
        extra = {"temperature": args.temperature, "ignore_eos": args.ignore_eos or None, **args.extra_body}
        warm = random_requests(args.num_warmups, input_len=args.random_input_len, output_len=8, seed=args.seed + 1)
        for request in warm:
            ended = await run_load(self._target, [request], [0.0], model=self.model, extra=extra)
            if (error := ended.records[0].error) is not None:
                raise StartError(f"{self._url}: the request before the run failed: {error}")
        before = read_work(self._api)
        with tqdm(total=len(requests), desc=self._url, unit="request", dynamic_ncols=True, file=sys.stderr) as progress:
            run = await run_load(
                self._target,
                requests,
                moments,
                model=self.model,
                max_concurrency=args.max_concurrency,
                extra=extra,
                on_end=lambda record: progress.update() and None,
            )
        self._work = work_between(before, read_work(self._api))
        return run

    def figures(self, run: Run, rate: float) -> dict[str, Any]:
        args = self._args
        head = {
            "backend": "openai-chat" if self._target.is_chat else "openai",
            "model_id": self.model,
            "tokenizer_id": self.model,
            "num_prompts": len(run.records),
            "request_rate": "inf" if rate == float("inf") else rate,
            "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency,
            "base_url": self._url,
            "work_seconds": self._work,
        }
        if self._trace is not None:
            head |= {"trace": self._trace.name, "request_rate": len(run.records) / self._trace.seconds if self._trace.seconds else "inf"}
        return provenance() | head | figures(run, percentiles=args.metric_percentiles, goodput=args.goodput or None)


def _trace(args: argparse.Namespace) -> Trace:
    """Raises `ConfigError` for flags that say otherwise what is sent and when."""
    others = {
        "--request-rate": args.request_rate != (float("inf"),),
        "--dataset-path": args.dataset_path,
        "--ramp-up-strategy": args.ramp_up_strategy,
    }
    for flag, given in others.items():
        if given:
            raise ConfigError(f"--trace says what is sent and when; leave {flag} out.")
    return read_sent_trace(args, args.num_prompts)


def _first_model(client: ApiClient, url: str) -> str:
    models = client.call("GET", "/v1/models").get("data")
    if not models:
        raise StartError(f"{url} names no model; give --model.")
    return str(models[0]["id"])


def _name(rate: float, model: str) -> str:
    shown = "inf" if rate == float("inf") else f"{rate:g}"
    return f"openai-{shown}qps-{model.replace('/', '-')}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def _numbered(name: str | None, number: int) -> str | None:
    if name is None or number == 1:
        return name
    path = Path(name)
    return f"{path.stem}-{number}{path.suffix}"
