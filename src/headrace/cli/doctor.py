"""`headrace doctor`: what keeps this machine, a running server or a module of yours from its speed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from headrace.cli.api_client import ApiClient
from headrace.cli.options import reader
from headrace.doctor import kernels, machine, placement, server
from headrace.doctor.finding import Finding

MAX_PROFILE_S = 10.0

EPILOG = """\
examples:
  headrace doctor                                 this machine
  headrace doctor http://127.0.0.1:8000           this machine and the server there
  headrace doctor http://127.0.0.1:8000 --profile 2   and what its steps do, which makes them slower for so long
  headrace doctor module package.module:factory   graph breaks and recompilations of a module of yours
  headrace doctor --json | jq '.[] | select(.ok | not)'

A factory returns a module and a list of argument tuples: the first is examined for graph breaks, copies and waits, the others for recompilations.
Exit status: 0 all is well, 1 something was found.
"""


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "doctor",
        help="find what keeps a machine, a server or a module from its speed",
        description="Finds what keeps a machine, a running server or a module from its speed: evidence, remedy, gain.",
        epilog=EPILOG,
    )
    parser.add_argument("what", nargs="*", metavar="URL | module FACTORY", help="a running server, or the word module and PACKAGE.MODULE:FACTORY")
    parser.add_argument("--json", action="store_true", help="findings as a list of JSON objects")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (default: $HEADRACE_API_KEY)")
    parser.add_argument(
        "--profile",
        type=reader(profile_seconds),
        metavar="SECONDS",
        help="record a server's kernels for so long (10 at most): copies, waits",
    )
    parser.set_defaults(run=run, refuse=parser.error)


def profile_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_PROFILE_S:
        raise ValueError(f"use a number of seconds above 0, of at most {MAX_PROFILE_S:g}")
    return seconds


def run(args: argparse.Namespace) -> int:
    match args.what:
        case []:
            findings = machine_findings()
        case ["module", name]:
            from headrace.doctor.module import load_factory, module_findings

            sys.path.insert(0, os.getcwd())  # as python -m does: the factory is most often there
            findings = module_findings(load_factory(name))
        case [url] if url != "module":
            findings = [*machine_findings(), *server_findings(url, args.api_key or os.environ.get("HEADRACE_API_KEY"), args.profile)]
        case _:
            args.refuse("give nothing, the URL of a server, or: module PACKAGE.MODULE:FACTORY")
    if args.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        print(report(findings))
    return int(any(not finding.ok for finding in findings))


def machine_findings() -> list[Finding]:
    facts = machine.read_machine()
    found = placement.read_placement()
    return [*(check(facts) for check in machine.CHECKS), *(check(found) for check in placement.CHECKS)]


def server_findings(url: str, api_key: str | None, profile: float | None = None) -> list[Finding]:
    client = ApiClient(url, api_key=api_key, timeout=60.0)
    status = client.call("GET", "/v1/status")
    with client.content("/metrics") as stream:
        metrics = server.parse_metrics(stream.read().decode())
    ready = client.call("GET", "/ready") if status["state"] == "ready" else {}
    facts = server.ServerFacts(status=status, ready=ready, metrics=metrics)
    traced = [] if profile is None else kernels.server_findings(client.call("POST", f"/debug/trace?seconds={profile:g}&kernels=true"))
    return [*(check(facts) for check in server.CHECKS), *server.time_findings(facts), *traced]


def report(findings: list[Finding]) -> str:
    """What is wrong first, each with its remedy; then what is well, a line each."""
    lines = []
    for finding in findings:
        if not finding.ok:
            lines += [f"! {finding.check}: {finding.evidence}", f"    remedy: {finding.remedy}"]
            lines += [f"    gain: {finding.gain}"] if finding.gain else []
    lines += [f"  {finding.check}: {finding.evidence}" for finding in findings if finding.ok]
    wrong = sum(not finding.ok for finding in findings)
    return "\n".join([*lines, f"{len(findings)} checks, {wrong} found something." if wrong else f"{len(findings)} checks, all is well."])
