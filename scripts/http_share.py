#!/usr/bin/env python3
"""What serving over HTTP takes of the engine's throughput: the same requests offline and over HTTP, in turns.

    python scripts/http_share.py                                    64 requests, 16 at a time, eight pairs of turns
    python scripts/http_share.py --pairs 4 --requests 32 -- --quantization none

Offline is `AsyncLLM` in this process: an engine of the same settings, whose tokens become text here. Over HTTP it is `headrace serve` and
streams that this process reads to their end. Both are started once and answer requests before anything is counted, so neither loads, compiles
or learns how long steps take during a turn. A pair is one turn of each, right after the other, with the same new prompts; which comes first
changes from pair to pair. A pair in whose turns other processes, or the machine below, took more than `--others` of the processors counts for
nothing and is measured again. What stands after `--` goes to both.

The result is the median of the pairs' ratios, with an interval that holds the true median at least 95 times in 100 whatever the distribution.
Processor times are those of the process that speaks HTTP, of the engines, and of this one: the client of one, half of the other.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psutil
import uvloop
from own_server import own_server
from token_load import TokenRequest, at_a_time, busy_requests, stream_over_http

from headrace.cli.options import ENGINE_GROUPS, add_options
from headrace.cli.settings import engine_options
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.prompts import ParsedPrompt
from headrace.sampling_params import SamplingParams

TRIES = 3  # for each pair, disturbed ones among them
CONFIDENCE = 0.95

Run = Callable[[TokenRequest], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    tokens_per_second: float  # output tokens
    others: float  # share of all processors that went to other processes, or was stolen by the machine below
    http_us: float  # microseconds of a core for each output token: the process that speaks HTTP,
    engine_us: float  # the engines, of which one is at rest,
    own_us: float  # and this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    offline: Turn
    served: Turn

    @property
    def share(self) -> float:
        return self.served.tokens_per_second / self.offline.tokens_per_second

    @property
    def others(self) -> float:
        return max(self.offline.others, self.served.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of processors so far."""

    at: float  # monotonic seconds
    machine: float  # all that processors did, and what was stolen from them
    http: float
    engines: float
    own: float


class Watch:
    """Who uses the processors."""

    def __init__(self, http_pid: int) -> None:
        self._http, self._own = psutil.Process(http_pid), psutil.Process()
        self._engines = [child for child in self._own.children(recursive=True) if child.pid != http_pid]

    def times(self) -> Times:
        all_of_it = psutil.cpu_times()
        at_rest = all_of_it.idle + getattr(all_of_it, "iowait", 0.0) + getattr(all_of_it, "guest", 0.0) + getattr(all_of_it, "guest_nice", 0.0)
        return Times(
            at=time.monotonic(),
            machine=sum(all_of_it) - at_rest,
            http=_seconds(self._http),
            engines=sum(_seconds(process) for process in self._engines),
            own=_seconds(self._own),
        )


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def turn(watch: Watch, requests: Sequence[TokenRequest], number: int, run: Run) -> Turn:
    before = watch.times()
    await at_a_time(number, requests, run)
    after = watch.times()
    tokens, seconds = sum(request.max_tokens for request in requests), after.at - before.at
    http, engines, own = after.http - before.http, after.engines - before.engines, after.own - before.own
    others = (after.machine - before.machine - http - engines - own) / seconds / (os.cpu_count() or 1)
    return Turn(
        tokens_per_second=tokens / seconds, others=others, http_us=1e6 * http / tokens, engine_us=1e6 * engines / tokens, own_us=1e6 * own / tokens
    )


async def pair(watch: Watch, requests: Sequence[TokenRequest], number: int, offline: Run, served: Run, *, offline_first: bool) -> Pair:
    if offline_first:
        alone = await turn(watch, requests, number, offline)
        return Pair(offline=alone, served=await turn(watch, requests, number, served))
    over_http = await turn(watch, requests, number, served)
    return Pair(offline=await turn(watch, requests, number, offline), served=over_http)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics, as many from below as from above, that holds the median with `CONFIDENCE`; None for too few values.

    The number of values below the median is binomial (n, 1/2): David and Nagaraja, Order Statistics, 7.1.
    """
    ordered, n = sorted(values), len(values)
    found = None
    for k in range((n + 1) // 2):  # the k lowest and the k highest are left out
        outside = 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n
        if 1 - outside >= CONFIDENCE:
            found = ordered[k], ordered[n - 1 - k]
    return found


def line(name: str, pair: Pair, *, counts: bool) -> str:
    alone, served = pair.offline, pair.served
    return (
        f"{name}: offline {alone.tokens_per_second:.1f} tokens/s, over HTTP {served.tokens_per_second:.1f} ({pair.share:.1%});"
        f" of a token, in us of a core: HTTP process {served.http_us:.0f}, its client {served.own_us:.0f}, instead of {alone.own_us:.0f};"
        f" engine {served.engine_us:.0f} instead of {alone.engine_us:.0f}; others took {pair.others:.1%}"
        f"{'' if counts else ': disturbed, does not count'}"
    )


def result(pairs: Sequence[Pair]) -> str:
    shares = [pair.share for pair in pairs]
    interval = median_interval(shares)
    within = "" if interval is None else f" ({interval[0]:.1%} to {interval[1]:.1%} with {CONFIDENCE:.0%})"
    return f"over HTTP / offline, median of {len(pairs)} pairs: {statistics.median(shares):.1%}{within}"


async def calm_pairs(count: int, most_others: float, one: Callable[[int, bool], Awaitable[Pair]]) -> list[Pair]:
    """So many pairs of `one(seed, offline_first)`, with a seed of its own each, without those that others disturbed."""
    pairs: list[Pair] = []
    for seed in range(TRIES * count):
        new = await one(seed, len(pairs) % 2 == 0)
        counts = new.others <= most_others
        print(line(f"pair {len(pairs) + 1}", new, counts=counts), flush=True)
        if counts:
            pairs.append(new)
            if len(pairs) == count:
                break
    return pairs


async def measure(args: argparse.Namespace, options: dict[str, object], url: str, http_pid: int) -> list[Pair]:
    async with AsyncLLM(**options) as llm:

        async def offline(request: TokenRequest) -> None:
            params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
            async for _ in llm.generate_parsed(ParsedPrompt(text=None, token_ids=request.prompt), params):
                pass

        async def served(request: TokenRequest) -> None:
            await stream_over_http(url, request)

        for run in (offline, served):
            await at_a_time(args.at_a_time, busy_requests(2 * args.at_a_time, seed=-1), run)
        watch = Watch(http_pid)

        def one(seed: int, offline_first: bool) -> Awaitable[Pair]:
            return pair(watch, busy_requests(args.requests, seed=seed), args.at_a_time, offline, served, offline_first=offline_first)

        return await calm_pairs(args.pairs, args.others, one)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="of a turn")
    parser.add_argument("--at-a-time", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--others", type=float, default=0.04, help="share of the processors that others may take during a turn")
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    args = parser.parse_args(arguments)
    engine = argparse.ArgumentParser()
    add_options(engine, ENGINE_GROUPS)
    options = engine_options({name.replace("_", "-"): value for name, value in vars(engine.parse_args(args.flags)).items()})
    # the loop is the server's kind, so that the client takes little of the machine
    with own_server(args.flags) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pairs = runner.run(measure(args, options, server.url, server.process.pid))
    if not pairs:
        raise SystemExit("others disturbed every pair: the machine is too busy to tell")
    print(result(pairs))


if __name__ == "__main__":
    main(sys.argv[1:])
