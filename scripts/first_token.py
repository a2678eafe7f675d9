#!/usr/bin/env python3
"""Where the time to the first token goes on a server at rest: every part from the client's first byte to the first event.

    python scripts/first_token.py                                 30 prompts of 128 tokens
    python scripts/first_token.py --prompt 1024 --requests 10 -- --quantization none

What stands after `--` goes to `headrace serve`. Requests come one after the other, with pauses, each on a connection of its own, with a new
prompt of token ids. The server's part of the times is what `/debug/trace` records; all clocks are the machine's monotonic one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from own_server import own_server
from plain_http import call
from token_load import MAX_TOKEN

WARM_UP = 3  # requests
PAUSE_S = 0.08  # between two requests
PARTS = (
    "connect",
    "read and parse",  # from the first byte sent until the request is ready for the engine
    "to the engine",  # until it begins to plan
    "plan",
    "to the runner",
    "step",
    "to the HTTP process",  # the result taken in, encoded, sent, read
    "to the client",  # text, event, the client wakes up
    "all",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of one request as the client sees it, in monotonic seconds."""

    begin: float
    connected: float
    first: float  # the first event has come


def ask(url: str, prompt: Sequence[int], *, tokens: int) -> Moments:
    """One streamed answer, read to its end. Raises SystemExit where it is refused."""
    parts = urlsplit(url)
    body = json.dumps(
        {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    begin = time.monotonic()
    with socket.create_connection((parts.hostname or "", parts.port or 80)) as connection:
        connected = time.monotonic()
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
        received = connection.recv(1 << 20)
        while b"data: " not in received and received.startswith(b"HTTP/1.1 200") and (piece := connection.recv(1 << 20)):
            received += piece
        first = time.monotonic()
        if b"data: " not in received:
            raise SystemExit(f"a request failed: {received[:300]!r}")
        while connection.recv(1 << 20):
            pass
    return Moments(begin=begin, connected=connected, first=first)


def parts_of(moments: Moments, trace: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds of each part; None where the trace does not hold the request, or its prompt took several steps."""
    origin = trace["otherData"]["begin"]

    def within(event: Mapping[str, Any]) -> bool:
        return moments.begin <= origin + event["ts"] / 1e6 <= moments.first

    events = [event for event in trace["traceEvents"] if event["ph"] != "M" and within(event)]
    arrival, plan, step = (next((event for event in events if event["name"].startswith(name)), None) for name in ("queued", "plan ", "step "))
    output = next((event for event in events if event["ph"] == "i"), None)
    if arrival is None or plan is None or step is None or output is None or sum(event["name"].startswith("prefill") for event in events) != 1:
        return None
    at = [
        *(moments.begin, moments.connected, origin + arrival["ts"] / 1e6),
        *(origin + moment / 1e6 for moment in (plan["ts"], plan["ts"] + plan["dur"], step["ts"], step["ts"] + step["dur"], output["ts"])),
        moments.first,
    ]
    return dict(zip(PARTS, [*(later - earlier for earlier, later in itertools.pairwise(at)), moments.first - moments.begin], strict=True))


def table(found: Sequence[Mapping[str, float]]) -> str:
    lines = ["| part | p50 ms | p90 ms | max ms |", "|---|---|---|---|"]
    for part in PARTS:
        values = sorted(1e3 * parts[part] for parts in found)
        lines.append(f"| {part} | {statistics.median(values):.2f} | {values[int(0.9 * (len(values) - 1))]:.2f} | {values[-1]:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--vocab", type=int, default=MAX_TOKEN, help="token ids are below it")
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    args = parser.parse_args(arguments)
    draw = random.Random(time.time_ns())

    def one(url: str) -> Moments:
        time.sleep(PAUSE_S)
        return ask(url, draw.choices(range(100, args.vocab), k=args.prompt), tokens=args.answer)

    with own_server(args.flags) as server:
        took = [one(server.url) for _ in range(WARM_UP)]
        seconds = min(30.0, 1.0 + args.requests * 2 * (PAUSE_S + max(moments.first - moments.begin for moments in took)))
        traces: list[Any] = []
        recorder = threading.Thread(target=lambda: traces.append(call(server.url, f"/debug/trace?seconds={seconds:.1f}", {})))
        recorder.start()
        time.sleep(0.2)
        asked = [one(server.url) for _ in range(args.requests)]
        recorder.join()
    found = [parts for moments in asked if (parts := parts_of(moments, traces[0])) is not None]
    print(f"{len(found)} of {args.requests} prompts of {args.prompt} tokens, each in one step\n\n{table(found)}")


if __name__ == "__main__":
    main(sys.argv[1:])
