#!/usr/bin/env python3
"""How long a server takes until it serves, and what its processes hold: at rest, and after a busy time.

    python scripts/footprint.py                                   three launches, then 64 requests, 16 at a time
    python scripts/footprint.py --launches 5 --requests 0 -- --compile full
    python scripts/footprint.py --long-prompts 4 -- --max-model-len 4096

A launch is from the start of the process to the end of an answer of one token over HTTP; the first one, which brings files into memory, is
not counted. Where steps are compiled or loaded, the last launch is watched until every path is prepared. Memory is given process by process:
what is resident now (its own pages, and those of files), and the most that ever was. What stands after `--` goes to `headrace serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from own_server import own_server
from plain_http import call, get
from token_load import MAX_TOKEN, TokenRequest, at_a_time, busy_requests, stream_over_http

AT_A_TIME = 16
LONG_PROMPT, LONG_ANSWER = 2048, 64  # tokens
PREPARED_SECONDS = 1800.0
MIB = 1024.0  # KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one process holds, in MiB."""

    name: str
    own: float  # resident pages that are nobody else's
    files: float  # resident pages of files
    peak: float  # the most that was resident at once


def holdings(pid: int) -> list[Holding]:
    """Of a process and all that it has started."""
    server = psutil.Process(pid)
    return [
        holding(name_of(process.cmdline()), Path(f"/proc/{process.pid}/status").read_text()) for process in (server, *server.children(recursive=True))
    ]


def holding(name: str, status: str) -> Holding:
    """From the text of `/proc/PID/status`."""
    kib = {key: float(value.split()[0]) for key, _, value in (line.partition(":") for line in status.splitlines()) if value.endswith(" kB")}
    return Holding(name=name, own=kib["RssAnon"] / MIB, files=(kib["RssFile"] + kib["RssShmem"]) / MIB, peak=kib["VmHWM"] / MIB)


def name_of(command: Sequence[str]) -> str:
    """The module that runs: `python -m headrace.engine.engine_host 4` is engine_host."""
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else Path(command[0] if command else "?").name
    return {"headrace": "HTTP", "engine_host": "engine"}.get(module.rpartition(".")[2], module.rpartition(".")[2])


def table(found: Sequence[Holding]) -> str:
    lines = ["| process | own pages, MiB | of files | most ever |", "|---|---|---|---|"]
    total = Holding(name="all", own=sum(one.own for one in found), files=sum(one.files for one in found), peak=sum(one.peak for one in found))
    return "\n".join([*lines, *(f"| {one.name} | {one.own:.0f} | {one.files:.0f} | {one.peak:.0f} |" for one in (*found, total))])


def first_token(url: str) -> None:
    call(url, "/v1/completions", {"prompt": [504, 253, 260], "max_tokens": 1, "temperature": 0})


def watch_preparation(url: str, begin: float) -> str | None:
    """When every path was prepared, in words; None where none is to be. `begin`: monotonic seconds."""
    while (told := get(url, "/ready").get("compile")) and told["paths"]:
        if not {"ready", "compiling"} & {path["state"] for path in told["paths"]}:
            names = ", ".join(f"{path['name']} {path['state']}" for path in told["paths"])
            return f"every path was prepared {time.monotonic() - begin:.1f} s after the launch: {names}"
        if time.monotonic() - begin > PREPARED_SECONDS:
            raise SystemExit(f"not prepared after {PREPARED_SECONDS:.0f} s: {told}")
        time.sleep(0.1)
    return None


def long_requests(count: int) -> list[TokenRequest]:
    draw = random.Random(0)
    return [TokenRequest(prompt=tuple(draw.choices(range(100, MAX_TOKEN), k=LONG_PROMPT)), max_tokens=LONG_ANSWER) for _ in range(count)]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=3, help="that are counted")
    parser.add_argument("--requests", type=int, default=64, help="of a busy service, after the last launch")
    parser.add_argument("--long-prompts", type=int, default=0, metavar="N", help=f"so many of {LONG_PROMPT} tokens among them")
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    args = parser.parse_args(arguments)
    seconds = []
    for number in range(args.launches + 1):
        begin = time.monotonic()
        with own_server(args.flags) as server:
            first_token(server.url)
            seconds.append(time.monotonic() - begin)
            if number < args.launches:
                continue
            taken = seconds[1:] or seconds
            print(f"first token after {statistics.median(taken):.2f} s (median of {len(taken)}; {min(taken):.2f} to {max(taken):.2f})", flush=True)
            if (prepared := watch_preparation(server.url, begin)) is not None:
                print(prepared, flush=True)
            print(f"\nat rest\n{table(holdings(server.process.pid))}", flush=True)
            requests = busy_requests(args.requests, seed=0) + long_requests(args.long_prompts)
            random.Random(0).shuffle(requests)
            if requests:
                asyncio.run(at_a_time(AT_A_TIME, requests, lambda request: stream_over_http(server.url, request)))
                print(f"\nafter {len(requests)} requests\n{table(holdings(server.process.pid))}")


if __name__ == "__main__":
    main(sys.argv[1:])
