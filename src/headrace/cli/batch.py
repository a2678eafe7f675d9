"""`headrace batch run | submit | status | cancel | result`: batches of a server that runs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from headrace.cli.api_client import ApiClient
from headrace.errors import ConfigError

EPILOG = """\
examples:
  headrace batch run requests.jsonl --output answers.jsonl   send it, wait, write the answers
  headrace batch submit requests.jsonl                       send it, print the batch's id
  headrace batch status BATCH
  headrace batch result BATCH --output answers.jsonl
  headrace batch cancel BATCH

A line of the file: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
Exit status 1: the batch failed, or some of its lines did; those are in the output as well, with their errors.
Without a server, `headrace generate` answers the prompts in files.
"""

DEFAULT_URL = "http://127.0.0.1:8000"
FINISHED = ("completed", "failed", "cancelled", "expired")
POLL_S = 0.5


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "batch",
        usage="headrace batch ACTION [FLAGS]",
        help="send a file of requests to a server, and fetch the answers",
        description="Send a file of requests to a server that runs, and fetch the answers.",
        epilog=EPILOG,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, text in (
        ("run", run_all, "send a file, wait for its end, write the answers"),
        ("submit", run_submit, "send a file and print the id of its batch"),
        ("status", run_status, "print a batch as JSON"),
        ("result", run_result, "wait for a batch and write its answers"),
        ("cancel", run_cancel, "end a batch; what is answered by then stays"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        sends, writes = name in ("run", "submit"), name in ("run", "result")
        action.add_argument("file" if sends else "batch", metavar="FILE" if sends else "BATCH", help="JSON lines" if sends else "id of the batch")
        if writes:
            action.add_argument("--output", "-o", metavar="FILE", help="where the answers go (default: stdout)")
        action.add_argument("--url", metavar="URL", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
        action.add_argument("--api-key", metavar="KEY", help="its key (default: $HEADRACE_API_KEY)")
        action.set_defaults(run=run)


def client_of(args: argparse.Namespace) -> ApiClient:
    return ApiClient(args.url, api_key=args.api_key or os.environ.get("HEADRACE_API_KEY"))


def submit(client: ApiClient, path: Path) -> str:
    """Sends the file; returns the batch's id."""
    endpoint = endpoint_of(path)
    file = client.upload("/v1/files", path, {"purpose": "batch"})
    batch = client.call("POST", "/v1/batches", {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"})
    return str(batch["id"])


def endpoint_of(path: Path) -> str:
    """The url of the first line. Raises `ConfigError`."""
    try:
        with path.open("rb") as stream:
            first = next((line for line in stream if line.strip()), b"")
        return str(json.loads(first)["url"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{path}: the first line is no JSON object with a url; `headrace batch --help` shows one.") from None


def wait(client: ApiClient, batch_id: str) -> dict[str, Any]:
    """The batch once it has ended; a bar shows how far it is."""
    from tqdm import tqdm

    with tqdm(desc="Lines", unit="line", dynamic_ncols=True, file=sys.stderr) as bar:
        while True:
            batch = client.call("GET", f"/v1/batches/{batch_id}")
            counts = batch["request_counts"]
            bar.total = counts["total"] or None
            bar.update(counts["completed"] + counts["failed"] - bar.n)
            if batch["status"] in FINISHED:
                return batch
            time.sleep(POLL_S)


def fetch(client: ApiClient, batch: dict[str, Any], output: str | None) -> int:
    """Writes all results of a batch that has ended; the exit status."""
    for fault in (batch["errors"] or {"data": []})["data"]:
        print(f"line {fault['line']}: {fault['message']}", file=sys.stderr)
    with open_output(output) as stream:
        for file_id in (batch["output_file_id"], batch["error_file_id"]):
            if file_id is not None:
                with client.content(f"/v1/files/{file_id}/content") as content:
                    shutil.copyfileobj(content, stream)
    counts = batch["request_counts"]
    print(f"{batch['status']}: {counts['completed']} of {counts['total']} lines answered, {counts['failed']} with an error.", file=sys.stderr)
    return int(batch["status"] != "completed" or counts["failed"] > 0)


def open_output(path: str | None) -> BinaryIO:
    if path is None:
        return open(sys.stdout.fileno(), "wb", closefd=False)
    try:
        return Path(path).open("wb")
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error.strerror}.") from None


def run_all(args: argparse.Namespace) -> int:
    client = client_of(args)
    batch_id = submit(client, Path(args.file))
    print(f"batch {batch_id}", file=sys.stderr)
    return fetch(client, wait(client, batch_id), args.output)


def run_submit(args: argparse.Namespace) -> int:
    print(submit(client_of(args), Path(args.file)))
    return 0


def run_status(args: argparse.Namespace) -> int:
    print(json.dumps(client_of(args).call("GET", f"/v1/batches/{args.batch}"), indent=2))
    return 0


def run_result(args: argparse.Namespace) -> int:
    client = client_of(args)
    return fetch(client, wait(client, args.batch), args.output)


def run_cancel(args: argparse.Namespace) -> int:
    print(client_of(args).call("POST", f"/v1/batches/{args.batch}/cancel")["status"])
    return 0
