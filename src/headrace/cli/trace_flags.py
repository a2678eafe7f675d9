"""The flags that choose a trace and how it is played, and reading it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.bench.traces import Trace, load_trace
from headrace.cli import values
from headrace.cli.options import reader
from headrace.errors import ConfigError


def add_speed(add: Callable[..., Any], trace: str = "the trace") -> None:
    add("--speed", type=reader(values.positive_number), default=1.0, metavar="X", help=f"{trace} at X times its rate (default: 1)")


def add_part(add: Callable[..., Any]) -> None:
    """How much of the trace, and how fast."""
    add("--num-requests", type=reader(values.positive_integer), metavar="N", help="only the trace's first N")
    add_speed(add)


def read_trace(args: argparse.Namespace, count: int | None) -> Trace:
    """`--trace` at its `--speed`; its first `count` requests, None: all. Raises `ConfigError`."""
    return load_trace(args.trace).first(count).faster(args.speed)


def read_sent_trace(args: argparse.Namespace, count: int | None) -> Trace:
    """One whose requests are sent to a server. Raises `ConfigError`, also for what only a simulation can play."""
    trace = read_trace(args, count)
    if any(request.tenant for request in trace.requests):
        raise ConfigError("--trace: tenants cannot be replayed, since each needs a key of the server; take the field tenant out.")
    return trace
