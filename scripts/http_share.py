#!/usr/bin/env python3
"""What serving over HTTP takes of the engine's throughput: the same requests offline and over HTTP, in turns.

    python scripts/http_share.py                                  64 requests, 16 at a time, two rounds
    python scripts/http_share.py --requests 32 --rounds 3 -- --quantization none

Offline is `AsyncLLM` in this process: an engine of the same settings, whose tokens become text here. Over HTTP it is `headrace serve` and
streams that this process reads to their end. A round is one of each, with new prompts; the first requests of each turn are not counted. What
stands after `--` goes to both. Processor seconds are those of the process that speaks HTTP and of this one, the client.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psutil
from own_server import own_server
from token_load import TokenRequest, at_a_time, busy_requests, stream_over_http

from headrace.cli.options import ENGINE_GROUPS, add_options
from headrace.cli.settings import engine_options
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.prompts import ParsedPrompt
from headrace.sampling_params import SamplingParams

WARM_UP = 16  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    tokens_per_second: float  # output tokens
    http_seconds: float = 0.0  # of a core, in the process that speaks HTTP
    client_seconds: float = 0.0


async def timed(requests: Sequence[TokenRequest], number: int, run: Callable[[TokenRequest], Awaitable[None]]) -> float:
    """Output tokens a second of all requests but the first ones."""
    await at_a_time(number, requests[:WARM_UP], run)
    begin = time.monotonic()
    await at_a_time(number, requests[WARM_UP:], run)
    return sum(request.max_tokens for request in requests[WARM_UP:]) / (time.monotonic() - begin)


async def offline(options: dict[str, object], requests: Sequence[TokenRequest], number: int) -> Turn:
    async with AsyncLLM(**options) as llm:

        async def run(request: TokenRequest) -> None:
            params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
            async for _ in llm.generate_parsed(ParsedPrompt(text=None, token_ids=request.prompt), params):
                pass

        return Turn(tokens_per_second=await timed(requests, number, run))


def over_http(flags: Sequence[str], requests: Sequence[TokenRequest], number: int) -> Turn:
    with own_server(flags) as server:
        process, us = psutil.Process(server.process.pid), psutil.Process()
        before, ours = process.cpu_times(), us.cpu_times()
        rate = asyncio.run(timed(requests, number, lambda request: stream_over_http(server.url, request)))
        after, later = process.cpu_times(), us.cpu_times()
    return Turn(
        tokens_per_second=rate,
        http_seconds=after.user + after.system - before.user - before.system,
        client_seconds=later.user + later.system - ours.user - ours.system,
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-a-time", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    args = parser.parse_args(arguments)
    engine = argparse.ArgumentParser()
    add_options(engine, ENGINE_GROUPS)
    options = engine_options({name.replace("_", "-"): value for name, value in vars(engine.parse_args(args.flags)).items()})
    turns: list[tuple[Turn, Turn]] = []
    for number in range(args.rounds):
        requests = busy_requests(WARM_UP + args.requests, seed=number)
        turns.append((asyncio.run(offline(options, requests, args.at_a_time)), over_http(args.flags, requests, args.at_a_time)))
        alone, served = turns[-1]
        tokens = sum(request.max_tokens for request in requests)
        print(
            f"round {number + 1}: offline {alone.tokens_per_second:.1f} tokens/s, over HTTP {served.tokens_per_second:.1f}"
            f" ({served.tokens_per_second / alone.tokens_per_second:.1%}); a token takes {1e6 * served.http_seconds / tokens:.0f} us of a core in"
            f" the HTTP process, {1e6 * served.client_seconds / tokens:.0f} in the client",
            flush=True,
        )
    print(f"over HTTP / offline, median: {statistics.median(served.tokens_per_second / alone.tokens_per_second for alone, served in turns):.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
