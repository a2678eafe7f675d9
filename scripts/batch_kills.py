#!/usr/bin/env python3
"""Kill a server again and again in the middle of a batch, and count the results: exactly one a line.

    python scripts/batch_kills.py --lines 200 --kills 3

Each kill is SIGKILL to the serving process at a random moment; the next server on the same --batch-dir goes on. What stands after `--` goes
to `headrace serve`. Exit status 1 if a line has no result, or two, or another one than a fresh request gets.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from own_server import own_server
from plain_http import begin_batch, call, get, get_text

PATH = "/v1/completions"
COMPARED = 5  # lines that are asked again in the end


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    args, serve = parser.parse_args(arguments[:at]), list(arguments[at + 1 :])
    with tempfile.TemporaryDirectory() as folder:
        return run(args, ["--batch-dir", folder, *serve])


def body(number: int, tokens: int) -> dict[str, Any]:
    return {"prompt": f"The number {number} is", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def run(args: argparse.Namespace, serve: list[str]) -> int:
    lines = [{"custom_id": f"c{number}", "method": "POST", "url": PATH, "body": body(number, args.tokens)} for number in range(args.lines)]
    batch_id, seen = "", 0
    for kill in range(1, args.kills + 1):
        goal = args.lines * kill // (args.kills + 1)
        with own_server(serve) as server:
            batch_id = batch_id or begin_batch(server.url, "\n".join(map(json.dumps, lines)).encode(), PATH)
            counts = until(server.url, batch_id, goal)
            if counts["completed"] < seen:
                raise SystemExit(f"{seen} results were told before the kill, {counts['completed']} after it")
            time.sleep(random.uniform(0, 0.1))
            server.kill()
            seen = counts["completed"]
            print(f"kill {kill}: {seen} of {args.lines} lines were told as completed", flush=True)
    with own_server(serve) as server:
        until(server.url, batch_id, args.lines)
        batch = get(server.url, f"/v1/batches/{batch_id}")
        while batch["status"] != "completed":
            time.sleep(0.1)
            batch = get(server.url, f"/v1/batches/{batch_id}")
        results = [json.loads(text) for text in get_text(server.url, f"/v1/files/{batch['output_file_id']}/content").splitlines()]
        times = Counter(result["custom_id"] for result in results)
        wrong = [number for number in range(0, args.lines, max(1, args.lines // COMPARED)) if not same(server.url, number, results, args.tokens)]
    missing = [line["custom_id"] for line in lines if not times[str(line["custom_id"])]]
    doubled = [name for name, count in times.items() if count > 1]
    print(
        f"{len(results)} results of {args.lines} lines; missing {missing}, doubled {doubled}, error file {batch['error_file_id']}, differing {wrong}"
    )
    counted = batch["request_counts"] == {"total": args.lines, "completed": args.lines, "failed": 0}
    return int(bool(missing or doubled or wrong or batch["error_file_id"] or not counted))


def until(url: str, batch_id: str, goal: int) -> dict[str, int]:
    """The counts of the batch once so many lines are completed."""
    while True:
        batch = get(url, f"/v1/batches/{batch_id}")
        if batch["status"] not in ("validating", "in_progress", "finalizing", "completed"):
            raise SystemExit(f"the batch is {batch['status']}: {batch['errors']}")
        counts: dict[str, int] = batch["request_counts"]
        if counts["completed"] >= goal:
            return counts
        time.sleep(0.02)


def same(url: str, number: int, results: list[dict[str, Any]], tokens: int) -> bool:
    """Whether the line's result is what the same request gets now."""
    (result,) = (result for result in results if result["custom_id"] == f"c{number}")
    fresh = call(url, PATH, body(number, tokens))
    return bool(result["response"]["body"]["choices"] == fresh["choices"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
