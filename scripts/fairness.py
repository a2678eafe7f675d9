#!/usr/bin/env python3
"""Whether a tenant that sends little is held up by one that sends twenty times as much, through HTTP.

    scripts/fairness.py                              a server of its own with the default model and two keys
    scripts/fairness.py -- MODEL --max-num-seqs 16   what stands after -- goes to `headrace serve`
    scripts/fairness.py --url http://127.0.0.1:8000 --light-key KEY --heavy-key KEY

Three phases. The light tenant alone: requests at random times, `--rate` a second. Then the same requests at the same times beside the heavy
tenant, whose requests of mixed lengths come at random times too and ask for `--work` times as many tokens a second: what cannot be
served queues up. Then both keep `--backlog` requests open each. Reported are the light tenant's times to first token in the first two phases, and
Jain's index of the tokens served in the third: prompts, when their first token comes, and answers.

Exit status 1 where the light tenant's p95 TTFT beside is more than MAX_SLOWDOWN times that alone, or Jain's index is under MIN_JAIN. It needs a
machine with nothing else running on it. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from own_server import own_server

from headrace.bench.figures import percentile

MAX_SLOWDOWN = 1.5
MIN_JAIN = 0.95
HEAVY_PROMPTS = (64, 128, 256, 512, 1200)  # tokens, each as likely as the others
HEAVY_ANSWERS = (16, 64, 128)
HEAVY_WORK = sum(HEAVY_PROMPTS) / len(HEAVY_PROMPTS) + sum(HEAVY_ANSWERS) / len(HEAVY_ANSWERS)  # tokens of a request, on average
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
KEYS = ("light-tenant-key", "heavy-tenant-key")  # of a server of its own


@dataclass(frozen=True, slots=True)
class Shape:
    prompt: int  # tokens
    answer: int


@dataclass(slots=True)
class Seen:
    """What one tenant got in one phase."""

    ttft: list[float] = field(default_factory=list)  # seconds
    gaps: list[float] = field(default_factory=list)  # seconds between two events of one stream
    tokens: list[tuple[float, int]] = field(default_factory=list)  # (when, how many were served)

    def served(self, begin: float, end: float) -> int:
        return sum(count for at, count in self.tokens if begin <= at < end)


class Tenant:
    def __init__(self, url: str, key: str, model: str, *, vocab: int, seed: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._key = key
        self._model = model
        self._vocab = vocab
        self._draw = random.Random(seed)
        self.seen = Seen()

    async def send(self, shape: Shape) -> None:
        """One streamed completion of a fresh prompt, to its end."""
        ids = [self._draw.randrange(self._vocab // 2, self._vocab) for _ in range(shape.prompt)]
        body = {"model": self._model, "prompt": ids, "max_tokens": shape.answer, "ignore_eos": True, "temperature": 0, "stream": True}
        content = json.dumps(body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        started = last = time.monotonic()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + content)
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"the server answered {status!r}: {(await reader.read(2000))!r}")
            count = 0
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                if b'"error"' in line:
                    raise SystemExit(f"a stream ended with {line!r}")
                found = COMPLETION_TOKENS.search(line)
                now, before, count = time.monotonic(), count, int(found[1]) if found else count
                if count == before:
                    continue
                if before:
                    self.seen.gaps.append(now - last)
                else:
                    self.seen.ttft.append(now - started)
                self.seen.tokens.append((now, count - before + (0 if before else shape.prompt)))
                last = now
            if count != shape.answer:
                raise SystemExit(f"a stream of {shape.answer} tokens ended after {count}")
        finally:
            writer.close()

    async def send_at(self, arrivals: Sequence[tuple[float, Shape]]) -> None:
        """Each so many seconds from now, whether those before have ended or not."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at, shape in arrivals:
                await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
                group.create_task(self.send(shape))

    async def keep_busy(self, shapes: Sequence[Shape]) -> None:
        """One after the other, without end."""
        while True:
            await self.send(self._draw.choice(shapes))


def arrivals_of(shapes: Sequence[Shape], *, rate: float, count: int, seed: int) -> list[tuple[float, Shape]]:
    draw = random.Random(seed)
    times = itertools.accumulate(draw.expovariate(rate) for _ in range(count))
    return [(at, draw.choice(shapes)) for at in times]


def jain(shares: Sequence[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def milliseconds(values: Sequence[float]) -> str:
    return f"p50 {1000 * percentile(sorted(values), 50):.0f} ms, p95 {1000 * percentile(sorted(values), 95):.0f} ms, max {1000 * max(values):.0f} ms"


async def stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Ends tasks by hanging up. What one of them raised before is raised here."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


def model_of(url: str, key: str) -> str:
    with urlopen(Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}), timeout=30) as response:
        return str(json.load(response)["data"][0]["id"])


async def measure(args: argparse.Namespace, url: str, keys: tuple[str, str]) -> bool:
    model = model_of(url, keys[0])
    light, heavy = (Tenant(url, key, model, vocab=args.vocab, seed=args.seed + number) for number, key in enumerate(keys))
    shape = Shape(args.prompt, args.answer)
    mixed = [Shape(prompt, answer) for prompt in HEAVY_PROMPTS for answer in HEAVY_ANSWERS]
    coming = arrivals_of([shape], rate=args.rate, count=args.requests, seed=args.seed)
    for warm_up in (shape, Shape(1200, 16), shape, shape):
        await light.send(warm_up)

    light.seen = alone = Seen()
    await light.send_at(coming)
    print(f"light alone: TTFT {milliseconds(alone.ttft)} ({len(alone.ttft)} requests of {args.prompt} + {args.answer} tokens)", flush=True)

    light.seen, heavy.seen = beside, flood = Seen(), Seen()
    rate = args.work * args.rate * (args.prompt + args.answer) / HEAVY_WORK
    count = int(rate * (coming[-1][0] + args.lead + 30.0))
    load = asyncio.create_task(heavy.send_at(arrivals_of(mixed, rate=rate, count=count, seed=args.seed + 1)))
    begin = time.monotonic()
    await asyncio.sleep(args.lead)
    await light.send_at(coming)
    seconds = time.monotonic() - begin
    await stop([load])
    tokens = [seen.served(begin, begin + seconds) / seconds for seen in (beside, flood)]
    print(f"light beside: TTFT {milliseconds(beside.ttft)}")
    print(f"heavy: {args.work * args.rate * (args.prompt + args.answer):.0f} tokens/s asked for; gaps {milliseconds(flood.gaps)}")
    print(f"tokens/s served: light {tokens[0]:.0f}, heavy {tokens[1]:.0f}", flush=True)

    light.seen, heavy.seen = first, second = Seen(), Seen()
    tasks = [asyncio.create_task(tenant.keep_busy(shapes)) for tenant, shapes in ((light, [shape]), (heavy, mixed)) for _ in range(args.backlog)]
    await asyncio.sleep(args.settle)
    begin = time.monotonic()
    await asyncio.sleep(args.window)
    await stop(tasks)
    served = [seen.served(begin, begin + args.window) for seen in (first, second)]
    index = jain(served)
    slowdown = percentile(sorted(beside.ttft), 95) / percentile(sorted(alone.ttft), 95)
    print(f"both backlogged for {args.window:g} s: light {served[0]} tokens, heavy {served[1]} tokens, {sum(served) / args.window:.0f} tokens/s")
    print(f"light's p95 TTFT beside / alone: {slowdown:.2f} (at most {MAX_SLOWDOWN})")
    print(f"Jain's index: {index:.3f} (at least {MIN_JAIN})", flush=True)
    return slowdown <= MAX_SLOWDOWN and index >= MIN_JAIN


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already, with nothing to do; needs the two keys")
    parser.add_argument("--light-key", help="API key of the light tenant")
    parser.add_argument("--heavy-key", help="API key of the heavy tenant")
    parser.add_argument("--rate", type=float, default=1.0, metavar="N", help="requests a second of the light tenant (default: 1)")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="requests of the light tenant in each phase (default: 64)")
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="of its prompts (default: 128)")
    parser.add_argument("--answer", type=int, default=32, metavar="TOKENS", help="of its answers (default: 32)")
    parser.add_argument("--work", type=float, default=20.0, metavar="TIMES", help="what the heavy tenant asks for (default: 20 times the light's)")
    parser.add_argument("--lead", type=float, default=6.0, metavar="SECONDS", help="that the heavy tenant is ahead (default: 6)")
    parser.add_argument("--backlog", type=int, default=48, metavar="N", help="requests of each tenant in the last phase (default: 48)")
    parser.add_argument("--settle", type=float, default=8.0, metavar="SECONDS", help="of the last phase that do not count (default: 8)")
    parser.add_argument("--window", type=float, default=30.0, metavar="SECONDS", help="of the last phase that count (default: 30)")
    parser.add_argument("--vocab", type=int, default=49152, help="of the model; token ids of prompts are from its upper half (default: 49152)")
    parser.add_argument("--seed", type=int, default=0)
    ours, serve = list(arguments), []
    if "--" in ours:
        at = ours.index("--")
        ours, serve = ours[:at], ours[at + 1 :]
    args = parser.parse_args(ours)
    if args.url and not (args.light_key and args.heavy_key):
        parser.error("--url needs --light-key and --heavy-key")
    with contextlib.ExitStack() as stack:
        url, keys = args.url, (args.light_key, args.heavy_key)
        if not url:
            file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "keys.yaml")
            file.write_text("".join(f"- {{name: {key.partition('-')[0]}, key: {key}}}\n" for key in KEYS), encoding="utf-8")
            url, keys = stack.enter_context(own_server([*serve, "--api-keys-file", str(file)])).url, KEYS
        return 0 if asyncio.run(measure(args, url, keys)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
