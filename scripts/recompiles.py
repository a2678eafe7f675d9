"""Throw steps of every shape at a compiled server, and see that nothing is compiled again.

    python scripts/recompiles.py                                  10 minutes, against a server of its own
    python scripts/recompiles.py --duration 60 -- --max-num-seqs 8 --compile full --max-seq-len-to-capture 512

First the breaks in the graph of a step are counted, then the server compiles (or finds its packages in the cache), and then waves of requests
come: any number at once, prompts from one token to beyond the static length, forks, seeds, log probabilities, grammars, embeddings, clients
that hang up. What stands after `--` goes to `headrace serve`; the default is `--compile full --max-seq-len-to-capture 1024`. Exit status 1 if
a verdict is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
from own_server import own_server, read_metrics

from headrace.cli.options import SERVE_GROUPS, add_options
from headrace.cli.settings import engine_options
from headrace.config import EngineConfig
from headrace.engine.async_llm import make_engine_config

SERVE = ("--compile", "full", "--max-seq-len-to-capture", "1024")
MAX_OUTPUT = 96  # tokens
COMPILE_SECONDS = 1800.0  # that preparing may take
COUNTERS = ("headrace_compilations_total", "headrace_recompiles_total", "headrace_engine_restarts_total")
SCHEMA = {"type": "object", "properties": {"stone": {"type": "integer"}}, "required": ["stone"]}


def graph_breaks(config: EngineConfig) -> dict[str, int]:
    """Breaks in the graph of a step of each kind, as torch counts them."""
    import torch

    from headrace.runner.model_runner import ModelRunner
    from headrace.runner.preparation import planned_buckets, step_shape, why_not
    from headrace.runner.step_module import StepModule, example_inputs

    runner = ModelRunner(config)
    try:
        reason = why_not(config, runner.model)
        if reason is not None:
            raise SystemExit(f"steps of this model are not compiled here: {reason}")
        shape = step_shape(config, runner.max_model_len, runner.caches)
        module = StepModule(runner.model, shape)
        buckets = {bucket.kind: bucket for bucket in reversed(planned_buckets(config, all_steps=True))}  # the smallest of each kind
        found = {}
        for kind, bucket in buckets.items():
            torch._dynamo.reset()
            with torch.no_grad():
                found[kind] = torch._dynamo.explain(module)(*example_inputs(module, bucket, shape)).graph_break_count
        return found
    finally:
        runner.close()


class Waves:
    """`most`: requests of the largest wave; `longest`: tokens of the longest prompt, of ids up to `max_token`."""

    def __init__(self, http: httpx.AsyncClient, draw: random.Random, *, most: int, longest: int, max_token: int) -> None:
        self._http = http
        self._draw = draw
        self._most = most
        self._longest = longest
        self._max_token = max_token
        self.statuses: Counter[int] = Counter()
        self.cancelled = 0
        self.sizes: Counter[int] = Counter()

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            size = self._between(1, self._most)
            self.sizes[size] += 1
            await asyncio.gather(*(self._request(end) for _ in range(size)))

    def _between(self, low: int, high: int) -> int:
        """Small numbers as often as large ones."""
        return min(high, int(low * math.exp(self._draw.uniform(0.0, math.log((high + 1) / low)))))

    async def _request(self, end: float) -> None:
        draw = self._draw
        prompt = [draw.randint(0, self._max_token) for _ in range(self._between(1, self._longest))]
        kind = draw.random()
        if kind < 0.05:
            path, body = "/v1/embeddings", {"input": [prompt]}
        else:
            path, body = "/v1/completions", self._completion(prompt)
        leave_after = draw.uniform(0.0, 3.0) if draw.random() < 0.1 else end - time.monotonic() + 60
        try:
            async with asyncio.timeout(leave_after), self._http.stream("POST", path, json=body) as response:
                await response.aread()
        except TimeoutError:
            self.cancelled += 1
        else:
            self.statuses[response.status_code] += 1

    def _completion(self, prompt: list[int]) -> dict[str, Any]:
        draw = self._draw
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": self._between(1, MAX_OUTPUT), "ignore_eos": True}
        body |= {"temperature": draw.choice((0, 1)), "n": draw.choice((1, 1, 1, 3)), "stream": draw.random() < 0.5}
        extras: tuple[dict[str, Any], ...] = (
            {"seed": draw.randrange(1 << 30)},
            {"logprobs": 3},
            {"prompt_logprobs": 2, "stream": False},
            {"frequency_penalty": 1.0, "top_p": 0.9},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "stone", "schema": SCHEMA}}, "ignore_eos": False},
        )
        return body | draw.choice(extras) if draw.random() < 0.5 else body


async def prepared(http: httpx.AsyncClient) -> dict[str, str]:
    """Name and state of every path, when none is on its way any more."""
    deadline = time.monotonic() + COMPILE_SECONDS
    while True:
        told = (await http.get("/ready")).json()["compile"]
        states = {path["name"]: path["state"] for path in told["paths"]}
        if states and not {"ready", "compiling"} & set(states.values()):
            return states
        if not states or time.monotonic() > deadline:
            raise SystemExit(f"nothing is prepared: {told['reason'] or told['state']}")
        await asyncio.sleep(0.5)


async def counters(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    found = {name: value for name, value in read_metrics(text).items() if name in COUNTERS}
    for path in ("compiled", "ready"):
        (line,) = (line for line in text.splitlines() if line.startswith(f'headrace_steps_total{{path="{path}"}}'))
        found[f"steps, {path} path"] = float(line.rsplit(" ", 1)[1])
    return found


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=args.duration + 600, limits=limits, trust_env=False) as http:
        begin = time.monotonic()
        states = await prepared(http)
        seconds = time.monotonic() - begin
        print(f"prepared after {seconds:.0f} s: {states}", file=sys.stderr, flush=True)
        model_limit = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
        longest = min(args.max_prompt, model_limit - MAX_OUTPUT)
        before = await counters(http)
        waves = Waves(http, random.Random(args.seed), most=args.clients, longest=longest, max_token=args.max_token)
        await waves.run(args.duration)
        after, later = await counters(http), await prepared(http)
    moved = {name: after[name] - before[name] for name in after}
    return {
        "seconds until every path was prepared": round(seconds, 1),
        "paths": later,
        "waves": sum(waves.sizes.values()),
        "sizes of waves": sorted(waves.sizes),
        "statuses": {str(status): count for status, count in sorted(waves.statuses.items())},
        "cancelled": waves.cancelled,
        "during the run": moved,
        "verdicts": {
            "every path was prepared": "failed" not in states.values(),
            "no path was lost": "failed" not in later.values(),
            "compiled paths took steps": moved["steps, compiled path"] > 0,
            "nothing was compiled": moved["headrace_compilations_total"] == 0,
            "no recompilation": after["headrace_recompiles_total"] == 0,
            "every answer was 200": set(waves.statuses) == {200},
            "no engine restart": after["headrace_engine_restarts_total"] == 0,
        },
    }


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=600.0, metavar="SECONDS", help="of the run, after everything is compiled")
    parser.add_argument("--clients", type=int, default=24, help="requests of the largest wave")
    parser.add_argument("--max-prompt", type=int, default=1500, metavar="TOKENS")
    parser.add_argument("--max-token", type=int, default=10_000, metavar="ID", help="prompts are of ids from 0 to this")
    parser.add_argument("--seed", type=int, default=0)
    ours, serve = list(arguments), []
    if "--" in ours:
        at = ours.index("--")
        ours, serve = ours[:at], ours[at + 1 :]
    return parser.parse_args(ours), serve or list(SERVE)


def engine_config(serve: Sequence[str]) -> EngineConfig:
    """Of the engine behind a server with these flags."""
    parser = argparse.ArgumentParser(prog="recompiles.py -- ...")
    parser.add_argument("model", nargs="?")
    add_options(parser, SERVE_GROUPS)
    settings = {name.replace("_", "-"): value for name, value in vars(parser.parse_args(serve)).items()}
    return make_engine_config(settings.pop("model"), {**engine_options(settings), "compile": "off"})


def main(arguments: Sequence[str]) -> int:
    args, serve = parse_arguments(arguments)
    breaks = graph_breaks(engine_config(serve))
    print(f"graph breaks: {breaks}", file=sys.stderr, flush=True)
    with own_server(serve) as server:
        found = asyncio.run(measure(server.url, args))
    found = {"graph breaks": breaks, **found}
    found["verdicts"]["no graph break"] = not any(breaks.values())
    print(json.dumps(found, indent=2))
    return int(not all(found["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
