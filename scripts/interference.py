#!/usr/bin/env python3
"""How much a long prompt disturbs a running stream.

    scripts/interference.py --url http://127.0.0.1:8000 --prompt-tokens 4096 --rounds 3

One stream decodes; after a while a prompt of N new tokens arrives; the gaps between the stream's tokens are reported before and during
its prefill. Needs a server of its own, with nothing else running. Standard library only.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import sys
import threading
import time
from urllib.parse import urlsplit

from headrace.bench.figures import percentile


def completion(url: str, body: dict[str, object], on_token=None) -> float:  # type: ignore[no-untyped-def]
    """Send a completion and read it to its end; returns seconds to the first token. `on_token(now)` is called for each event with tokens."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=600)
    started = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the server answered {response.status}: {response.read(500)!r}")
    first = 0.0
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise SystemExit(f"the stream ended with {event}")
        for choice in event["choices"]:
            now = time.monotonic()
            for _ in choice.get("token_ids") or []:
                first = first or now - started
                if on_token:
                    on_token(now)
    connection.close()
    return first


def measure(url: str, model: str, prompt_tokens: int, before_s: float, vocab: int) -> tuple[list[float], list[float], float]:
    """One round: gaps in milliseconds before and during the prefill, and the long prompt's time to first token in seconds."""
    times: list[float] = []
    window: list[float] = []
    ids = [random.randrange(1000, vocab) for _ in range(prompt_tokens)]
    stop = threading.Event()

    def stream() -> None:
        while not stop.is_set():  # one stream after the other, so that it lasts as long as the prefill
            body = {"model": model, "prompt": "one two three", "max_tokens": 512, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            times.append(-1.0)
            completion(url, body, on_token=times.append)

    thread = threading.Thread(target=stream)
    thread.start()
    time.sleep(before_s)
    window.append(time.monotonic())
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    ttft = completion(url, body)
    window.append(time.monotonic())
    stop.set()
    thread.join()
    before, during = [], []
    for earlier, later in itertools.pairwise(times):
        if earlier < 0 or later < 0:
            continue  # a new stream begins
        if window[0] - before_s + 1 < earlier and later < window[0]:
            before.append(1000 * (later - earlier))
        elif earlier >= window[0] and later <= window[1]:
            during.append(1000 * (later - earlier))
    return before, during, ttft


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=float, default=6.0, help="seconds of undisturbed decoding")
    parser.add_argument("--vocab", type=int, default=49152)
    options = parser.parse_args()
    parts = urlsplit(options.url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=30)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    ratios = []
    for number in range(1, options.rounds + 1):
        before, during, ttft = measure(options.url, model, options.prompt_tokens, options.before, options.vocab)
        before.sort()
        during.sort()
        median, middle, late = statistics.median(before), statistics.median(during), percentile(during, 99)
        ratios.append(late / median)
        print(
            f"round {number}: before p50 {median:.1f} p99 {percentile(before, 99):.1f} ms ({len(before)} gaps); "
            f"during p50 {middle:.1f} p99 {late:.1f} max {during[-1]:.1f} ms ({len(during)} gaps); "
            f"prefill {ttft:.1f} s; p50 x {middle / median:.2f}, p99 x {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"p99 during / undisturbed median, median of the rounds: {statistics.median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
