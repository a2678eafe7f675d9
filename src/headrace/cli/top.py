"""`headrace top`: what a running server does, and what its time goes into."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from typing import Any

from headrace.cli import values
from headrace.cli.api_client import ApiClient
from headrace.cli.options import reader
from headrace.observe.work import KINDS, WORDS

EPILOG = """\
examples:
  headrace top                                    the server on http://127.0.0.1:8000, a new picture every second
  headrace top http://gpu-7:8000 --interval 5
  headrace top --once --json | jq .engine.remarks
"""
CLEAR = "\x1b[H\x1b[2J"
FIGURES = (("generation_tokens_total", "tokens out/s"), ("prompt_tokens_total", "tokens in/s"), ("steps_total", "steps/s"))
BLOCKS = ("used", "cached", "free")


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "top",
        help="watch a running server",
        description="Shows what a running server does, and what its time goes into.",
        epilog=EPILOG,
    )
    parser.add_argument("url", nargs="?", metavar="URL", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--interval", type=reader(values.seconds), metavar="SECONDS", default=1.0, help="between two pictures (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="one picture, of one interval, and no more")
    parser.add_argument("--json", action="store_true", help="with --once: the server's own answer of /v1/status instead of a picture")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (default: $HEADRACE_API_KEY)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    client = ApiClient(args.url, api_key=args.api_key or os.environ.get("HEADRACE_API_KEY"), timeout=10.0)
    before = client.call("GET", "/v1/status")
    if args.json:
        print(json.dumps(before, indent=2))
        return 0
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        while True:
            time.sleep(args.interval)
            status = client.call("GET", "/v1/status")
            print((CLEAR if sys.stdout.isatty() else "") + picture(before, status, width=shutil.get_terminal_size().columns), flush=True)
            if args.once:
                break
            before = status
    return 0


def picture(before: dict[str, Any], now: dict[str, Any], *, width: int = 80) -> str:
    """Two answers of /v1/status, as lines of text."""
    lines = [f"{now['model']}  {now['state']}  headrace {now['version']}"]
    engine, old = now["engine"], before["engine"]
    if engine is None:
        return "\n".join([*lines, "The engine has computed nothing yet."])
    if old is None or old["at"] > engine["at"]:  # it has started since
        old = {key: 0 if isinstance(value, int | float) else value for key, value in engine.items()} | {
            "at": engine["at"] - sum(engine["work_seconds_total"].values()),
            "work_seconds_total": dict.fromkeys(engine["work_seconds_total"], 0.0),
        }
    seconds = max(engine["at"] - old["at"], 1e-9)
    blocks = engine["kv_blocks"]
    lines += [
        f"requests   {engine['running']} of {now['max_num_seqs']} running, {engine['waiting']} waiting, {engine['swapped']} swapped out",
        "KV blocks  " + ", ".join(f"{blocks[name]} {name}" for name in BLOCKS) + f" of {blocks['total']}",
        "rates      " + ", ".join(f"{(engine[name] - old[name]) / seconds:.1f} {unit}" for name, unit in FIGURES),
        "",
    ]
    spent = {kind: engine["work_seconds_total"][kind] - old["work_seconds_total"][kind] for kind in KINDS}
    total = sum(spent.values())
    bar = max(10, min(40, width - 60))
    for kind in KINDS:
        share = spent[kind] / total if total > 0 else 0.0
        lines.append(f"{kind:<12}{share:>6.1%}  {'#' * round(share * bar):<{bar}}  {WORDS[kind]}"[:width])
    remarks = [remark["text"] for remark in engine["remarks"]]
    return "\n".join([*lines, *(["", "Since the engine started:"] if remarks else []), *remarks])
