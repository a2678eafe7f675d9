"""Load a server for a while as careless clients would, and see that nothing sticks, fails or grows.

    python scripts/soak.py                                  10 minutes, 32 clients, against a server of its own
    python scripts/soak.py --duration 30 --clients 8 -- --max-num-seqs 8
    python scripts/soak.py --url http://127.0.0.1:8000 --pid 1234

Random lengths; a share of the requests is cancelled at a random moment, another share is malformed. What stands after `--` goes to
`headrace serve`. At the end it waits for rest and asks /metrics. Exit status 1 if a verdict is not met.

Pages of the KV storage are taken from the system when a block is first used, so memory grows until all blocks have been: that is filled up
before the time begins, with all clients at once and prompts of full length, which also makes steps as large as they get. What grows after
the warm-up is growth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from own_server import AT_REST, own_server, read_metrics

MAX_SLOPE = 1.0  # MiB a minute after the warm-up
MIN_WATCHED = 60.0  # seconds of memory samples that a slope needs
REST_SECONDS = 30.0  # that the server may take to come to rest
NOISE = 0.02  # of all KV blocks: the last one of a request is blank again after it, used or not
FILL_TOKENS = 8  # of an answer while the KV storage is filled
WORDS = ("water", "wheel", "mill", "stream", "stone", "grain", "flour", "river", "gate", "flow", "turn", "power", "dam", "pond", "race", "gear")

MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"null",
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "no_such_field": 1}',
    b'{"prompt": ["x", 3]}',
    b'{"prompt": [999999999]}',
    b'{"prompt": "x", "logit_bias": {"a": 1}}',
    b'{"prompt": "x", "stop": [""]}',
    b'{"prompt": "\\ud800", "n": 0}',
    b"[" * 10_000,
)


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    cancelled: int = 0
    malformed: int = 0
    malformed_accepted: int = 0
    broken: Counter[str] = field(default_factory=Counter)  # connections that failed, by kind of error
    refused: Counter[int] = field(default_factory=Counter)  # good requests that were neither answered nor told to come again, by status
    stuck: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Memory:
    """Resident memory of the server's processes, over time."""

    at: list[float] = field(default_factory=list)  # seconds since the load began
    mib: list[dict[str, float]] = field(default_factory=list)  # of each process

    def add(self, at: float, mib: dict[str, float]) -> None:
        self.at.append(at)
        self.mib.append(mib)

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for sample in self.mib for name in sample))

    def of(self, name: str | None) -> list[float]:
        """Of one process, 0 while it does not run; None: of all together."""
        return [sum(sample.values()) if name is None else sample.get(name, 0.0) for sample in self.mib]

    def slope(self, since: float, name: str | None = None) -> float | None:
        """MiB a minute by least squares; None where the time is too short to tell growth from noise."""
        points = [(at / 60, mib) for at, mib in zip(self.at, self.of(name), strict=True) if at >= since]
        if len(points) < 3 or points[-1][0] - points[0][0] < MIN_WATCHED / 60:
            return None
        mean_at = sum(at for at, _ in points) / len(points)
        mean_mib = sum(mib for _, mib in points) / len(points)
        spread = sum((at - mean_at) ** 2 for at, _ in points)
        return sum((at - mean_at) * (mib - mean_mib) for at, mib in points) / spread

    def summary(self, since: float, name: str | None = None) -> dict[str, float | None]:
        mib, slope = self.of(name), self.slope(since, name)
        return {
            "first": round(mib[0], 1),
            "last": round(mib[-1], 1),
            "most": round(max(mib), 1),
            "MiB/min": None if slope is None else round(slope, 3),
        }


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already; with --pid, or its memory is not watched")
    parser.add_argument("--pid", type=int, help="the server's process")
    parser.add_argument("--duration", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--warm-up", type=float, metavar="SECONDS", help="of the duration, in which memory may grow (default: a quarter)")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--cancel", type=float, default=0.2, metavar="SHARE")
    parser.add_argument("--malformed", type=float, default=0.05, metavar="SHARE")
    parser.add_argument("--max-prompt", type=int, default=400, metavar="WORDS")
    parser.add_argument("--max-output", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--patience", type=float, default=300.0, metavar="SECONDS", help="a request that takes longer is stuck")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the report there too")
    ours, serve = list(arguments), []
    if "--" in ours:
        at = ours.index("--")
        ours, serve = ours[:at], ours[at + 1 :]
    return parser.parse_args(ours), serve


class Soak:
    def __init__(self, args: argparse.Namespace, url: str, pid: int | None) -> None:
        self._args = args
        self._pid = pid
        self._begin = self._end = time.monotonic()
        self.filling_seconds = 0.0
        self.tally = Tally()
        self.memory = Memory()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
        self._http = httpx.AsyncClient(base_url=url, timeout=args.patience, limits=limits, trust_env=False)

    async def run(self) -> dict[str, float]:
        """Load until the time is over; the metrics at rest."""
        async with self._http:
            await self._fill()
            self.filling_seconds = time.monotonic() - self._begin
            self._begin = time.monotonic()
            self._end = self._begin + self._args.duration
            watch = asyncio.create_task(self._watch_memory())
            try:
                await asyncio.gather(*(self._client(random.Random(f"{self._args.seed}-{index}")) for index in range(self._args.clients)))
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            return await self._rest()

    async def _fill(self) -> None:
        """Rounds of the largest requests, until one finds hardly any block that has never held anything."""
        draw = random.Random(f"{self._args.seed}-fill")
        blank = float("inf")
        while (left := await self._blank_share()) < blank - NOISE:
            blank = left
            bodies = [
                self._body(draw, words=self._args.max_prompt, tokens=FILL_TOKENS) | {"n": 2, "ignore_eos": True} for _ in range(self._args.clients)
            ]
            for response in await asyncio.gather(*(self._http.post(path_of(body), json=body) for body in bodies)):
                if response.status_code not in (200, 429):
                    raise SystemExit(f"a prompt of {self._args.max_prompt} words is answered {response.status_code}: {response.text[:500]}")

    async def _blank_share(self) -> float:
        """Of the KV blocks, those in which nothing is cached, at rest."""
        await self._rest()
        blocks = (await self._http.get("/v1/status")).json()["engine"]["kv_blocks"]
        return float(blocks["free"] / blocks["total"])

    async def _client(self, draw: random.Random) -> None:
        while time.monotonic() < self._end:
            chance = draw.random()
            try:
                if chance < self._args.malformed:
                    await self._send_malformed(draw)
                elif chance < self._args.malformed + self._args.cancel:
                    await self._send(draw, leave_after=draw.uniform(0.0, 2.0))
                else:
                    await self._send(draw, leave_after=None)
            except (TimeoutError, httpx.TimeoutException):
                self.tally.stuck += 1
            except httpx.HTTPError as error:
                self.tally.broken[type(error).__name__] += 1

    async def _send(self, draw: random.Random, *, leave_after: float | None) -> None:
        """One good request; `leave_after` so many seconds the client hangs up, whatever has come by then. Raises where it is stuck."""
        body = self._body(draw, words=draw.randint(1, self._args.max_prompt), tokens=draw.randint(1, self._args.max_output))
        body |= {"stream": draw.random() < 0.5, "n": draw.choice((1, 1, 1, 2)), "ignore_eos": draw.random() < 0.5}
        patience = self._args.patience if leave_after is None else leave_after
        try:
            async with asyncio.timeout(patience), self._http.stream("POST", path_of(body), json=body) as response:
                content = await response.aread()
        except TimeoutError:
            if leave_after is None:
                raise
            self.tally.cancelled += 1
            return
        self._judge(body, response, content)
        if response.status_code == 429:
            await asyncio.sleep(float(response.headers["Retry-After"]))

    def _body(self, draw: random.Random, *, words: int, tokens: int) -> dict[str, Any]:
        """A chat or a completion, with log probabilities or without."""
        text = " ".join(draw.choices(WORDS, k=words))
        chat = draw.random() < 0.5
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        logprobs = draw.choice((None, None, True if chat else 2))
        return body | {"max_tokens": tokens, "temperature": draw.choice((0, 1)), "logprobs": logprobs}

    def _judge(self, body: dict[str, Any], response: httpx.Response, content: bytes) -> None:
        status = response.status_code
        self.tally.statuses[status] += 1
        if status not in (200, 429):
            self.tally.refused[status] += 1
        elif status == 200 and body["stream"]:
            if b'data: {"error"' in content:
                self.tally.broken["error event in a stream"] += 1
            if not content.endswith(b"data: [DONE]\n\n"):
                self.tally.broken["stream without its end"] += 1
        elif status == 200:
            self.tally.tokens += json.loads(content)["usage"]["completion_tokens"]

    async def _send_malformed(self, draw: random.Random) -> None:
        response = await self._http.post("/v1/completions", content=draw.choice(MALFORMED), headers={"Content-Type": "application/json"})
        self.tally.statuses[response.status_code] += 1
        self.tally.malformed += 1
        self.tally.malformed_accepted += response.status_code < 400

    async def _watch_memory(self) -> None:
        if self._pid is None:
            return
        server = psutil.Process(self._pid)
        while True:
            processes = [server, *server.children(recursive=True)]
            with contextlib.suppress(psutil.NoSuchProcess):  # a child may end between the two looks
                mib: dict[str, float] = {}
                for process in processes:
                    name = name_of(process.cmdline())
                    mib[name] = mib.get(name, 0.0) + process.memory_info().rss / 2**20
                self.memory.add(time.monotonic() - self._begin, mib)
            await asyncio.sleep(max(0.2, self._args.duration / 600))

    async def _rest(self) -> dict[str, float]:
        deadline = time.monotonic() + REST_SECONDS
        while True:
            metrics = read_metrics((await self._http.get("/metrics")).text)
            if not any(metrics[name] for name in AT_REST) or time.monotonic() > deadline:
                return metrics
            await asyncio.sleep(0.2)


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def name_of(command: Sequence[str]) -> str:
    """What a process of the server is, by its command line."""
    for word, name in (("headrace.engine.engine_host", "engine"), ("headrace.text.grammar_worker", "grammar worker")):
        if word in command:
            return name
    return "HTTP" if "serve" in command else "other"


def report(soak: Soak, metrics: dict[str, float], warm_up: float) -> dict[str, Any]:
    tally, memory = soak.tally, soak.memory
    slope = memory.slope(warm_up)
    server_errors = sum(count for status, count in tally.statuses.items() if status >= 500)
    verdicts = {
        "no response >= 500": server_errors == 0,
        "nothing stuck": tally.stuck == 0,
        "nothing broken": not tally.broken,
        "good requests all served": not tally.refused and tally.statuses[200] > 0,
        "malformed all refused": tally.malformed_accepted == 0,
        "all blocks free": not any(metrics[name] for name in AT_REST),
        "no engine restart": metrics["headrace_engine_restarts_total"] == 0,
    }
    if slope is not None:
        verdicts[f"memory slope < {MAX_SLOPE:g} MiB/min"] = slope < MAX_SLOPE
    return {
        "requests": sum(tally.statuses.values()) + tally.cancelled,
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "cancelled": tally.cancelled,
        "malformed": tally.malformed,
        "output tokens of plain answers": tally.tokens,
        "broken": dict(tally.broken),
        "good requests refused": {str(status): count for status, count in sorted(tally.refused.items())},
        "seconds until all KV blocks had been used": round(soak.filling_seconds, 1),
        "memory MiB": {name or "all": memory.summary(warm_up, name) for name in (None, *memory.names())} if memory.at else None,
        "at rest": {name: metrics[name] for name in AT_REST},
        "engine restarts": metrics["headrace_engine_restarts_total"],
        "verdicts": verdicts,
    }


def main(arguments: Sequence[str]) -> int:
    args, serve = parse_arguments(arguments)
    with contextlib.ExitStack() as stack:
        url, pid = args.url, args.pid
        if not url:
            server = stack.enter_context(own_server(serve))
            url, pid = server.url, server.process.pid
        soak = Soak(args, url, pid)
        metrics = asyncio.run(soak.run())
    found = report(soak, metrics, args.duration / 4 if args.warm_up is None else args.warm_up)
    text = json.dumps(found, indent=2)
    print(text)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return int(not all(found["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
