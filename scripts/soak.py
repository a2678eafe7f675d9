"""Load a server for a while as careless clients would, and see that nothing sticks, fails or grows.

    python scripts/soak.py                                  10 minutes, 32 clients, against a server of its own
    python scripts/soak.py --duration 30 --clients 8 -- --max-num-seqs 8
    python scripts/soak.py --url http://127.0.0.1:8000 --pid 1234

Random lengths; a share of the requests is cancelled at a random moment, another share is malformed. What stands after `--` goes to
`headrace serve`. At the end it waits for rest and asks /metrics. Exit status 1 if a verdict is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

MAX_SLOPE = 1.0  # MiB a minute after the warm-up
MIN_WATCHED = 60.0  # seconds of memory samples that a slope needs
REST_SECONDS = 30.0  # that the server may take to come to rest
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
    stuck: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Memory:
    """Resident memory of all processes of the server, over time."""

    at: list[float] = field(default_factory=list)  # seconds since the start
    mib: list[float] = field(default_factory=list)

    def slope(self, since: float) -> float | None:
        """MiB a minute by least squares; None where the time is too short to tell growth from noise."""
        points = [(at / 60, mib) for at, mib in zip(self.at, self.mib, strict=True) if at >= since]
        if len(points) < 3 or points[-1][0] - points[0][0] < MIN_WATCHED / 60:
            return None
        mean_at = sum(at for at, _ in points) / len(points)
        mean_mib = sum(mib for _, mib in points) / len(points)
        spread = sum((at - mean_at) ** 2 for at, _ in points)
        return sum((at - mean_at) * (mib - mean_mib) for at, mib in points) / spread


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already; with --pid, or its memory is not watched")
    parser.add_argument("--pid", type=int, help="the server's process")
    parser.add_argument("--duration", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--warm-up", type=float, metavar="SECONDS", help="memory may grow so long (default: a quarter of the duration)")
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


@contextlib.contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """URL and process id of a server that ends with the block."""
    with tempfile.TemporaryFile("w+") as log:
        # port 0: the server chooses, and its ready message says which
        command = [sys.executable, "-m", "headrace", "serve", *arguments, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                assert process.stdout is not None
                first = process.stdout.readline()
                if " is ready at " not in first:
                    log.seek(0)
                    raise SystemExit(f"the server does not start: {first}{log.read()[-2000:]}")
                yield first.split(" is ready at ")[1].strip(), process.pid
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


class Soak:
    def __init__(self, args: argparse.Namespace, url: str, pid: int | None) -> None:
        self._args = args
        self._pid = pid
        self._begin = time.monotonic()
        self._end = self._begin + args.duration
        self.tally = Tally()
        self.memory = Memory()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
        self._http = httpx.AsyncClient(base_url=url, timeout=args.patience, limits=limits, trust_env=False)

    async def run(self) -> dict[str, float]:
        """Load until the time is over; the metrics at rest."""
        async with self._http:
            watch = asyncio.create_task(self._watch_memory())
            try:
                await asyncio.gather(*(self._client(random.Random(f"{self._args.seed}-{index}")) for index in range(self._args.clients)))
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            return await self._rest()

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
            except httpx.TimeoutException:
                self.tally.stuck += 1
            except httpx.HTTPError as error:
                self.tally.broken[type(error).__name__] += 1

    async def _send(self, draw: random.Random, *, leave_after: float | None) -> None:
        """One good request; `leave_after` so many seconds the client hangs up, whatever has come by then."""
        chat = draw.random() < 0.5
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, self._args.max_prompt)))
        body: dict[str, Any] = {
            "max_tokens": draw.randint(1, self._args.max_output),
            "temperature": draw.choice((0, 1)),
            "ignore_eos": draw.random() < 0.5,
        }
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        body |= {"stream": draw.random() < 0.5, "n": draw.choice((1, 1, 1, 2)), "logprobs": draw.choice((None, None, True if chat else 2))}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        try:
            async with asyncio.timeout(leave_after), self._http.stream("POST", path, json=body) as response:
                content = await response.aread()
        except TimeoutError:
            self.tally.cancelled += 1
            return
        self.tally.statuses[response.status_code] += 1
        if response.status_code == 200 and b'"error"' in content and body["stream"]:
            self.tally.broken["error event in a stream"] += 1
        if response.status_code == 429:
            await asyncio.sleep(float(response.headers["Retry-After"]))
        elif response.status_code == 200 and not body["stream"]:
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
                self.memory.mib.append(sum(process.memory_info().rss for process in processes) / 2**20)
                self.memory.at.append(time.monotonic() - self._begin)
            await asyncio.sleep(max(0.2, self._args.duration / 600))

    async def _rest(self) -> dict[str, float]:
        deadline = time.monotonic() + REST_SECONDS
        while True:
            metrics = read_metrics((await self._http.get("/metrics")).text)
            if not any(metrics[name] for name in AT_REST) or time.monotonic() > deadline:
                return metrics
            await asyncio.sleep(0.2)


AT_REST = ("headrace_num_requests_running", "headrace_num_requests_waiting", "headrace_num_requests_swapped", "headrace_kv_cache_usage_perc")


def read_metrics(text: str) -> dict[str, float]:
    """Sums over the labels of each metric."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            sums[name] = sums.get(name, 0.0) + value
    return sums


def report(soak: Soak, metrics: dict[str, float], warm_up: float) -> dict[str, Any]:
    tally, mib, slope = soak.tally, soak.memory.mib, soak.memory.slope(warm_up)
    server_errors = sum(count for status, count in tally.statuses.items() if status >= 500)
    return {
        "requests": sum(tally.statuses.values()) + tally.cancelled,
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "cancelled": tally.cancelled,
        "malformed": tally.malformed,
        "output tokens of plain answers": tally.tokens,
        "broken": dict(tally.broken),
        "memory MiB (first, last, most)": [round(mib) for mib in (*mib[:1], *mib[-1:], max(mib, default=0.0))],
        "memory slope MiB/min": None if slope is None else round(slope, 3),
        "at rest": {name: metrics[name] for name in AT_REST},
        "engine restarts": metrics.get("headrace_engine_restarts_total", 0.0),
        "verdicts": {
            "no response >= 500": server_errors == 0,
            "nothing stuck": tally.stuck == 0,
            "nothing broken": not tally.broken,
            "malformed all refused": tally.malformed_accepted == 0,
            "all blocks free": not any(metrics[name] for name in AT_REST),
            "no engine restart": metrics.get("headrace_engine_restarts_total", 0.0) == 0,
            f"memory slope < {MAX_SLOPE:g} MiB/min": slope is None or slope < MAX_SLOPE,
        },
    }


def main(arguments: Sequence[str]) -> int:
    args, serve = parse_arguments(arguments)
    with contextlib.ExitStack() as stack:
        url, pid = (args.url, args.pid) if args.url else stack.enter_context(own_server(serve))
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
