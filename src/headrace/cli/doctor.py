"""`headrace doctor`: what keeps this machine, a running server or a module of yours from its speed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from headrace.cli.api_client import ApiClient
from headrace.doctor import machine, server
from headrace.doctor.finding import Finding

EPILOG = """\
examples:
  headrace doctor                                 this machine
  headrace doctor http://127.0.0.1:8000           this machine and the server there
  headrace doctor module package.module:factory   graph breaks and recompilations of a module of yours
  headrace doctor --json | jq '.[] | select(.ok | not)'

A factory returns a module and a list of argument tuples: the first is examined for graph breaks, the others for recompilations.
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
    parser.set_defaults(run=run, refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    match args.what:
        case []:
            findings = machine_findings()
        case ["module", name]:
            from headrace.doctor.module import load_factory, module_findings

            sys.path.insert(0, os.getcwd())  # as python -m does: the factory is most often there
            findings = module_findings(load_factory(name))
        case [url] if url != "module":
            findings = [*machine_findings(), *server_findings(url, args.api_key or os.environ.get("HEADRACE_API_KEY"))]
        case _:
            args.refuse("give nothing, the URL of a server, or: module PACKAGE.MODULE:FACTORY")
    if args.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        print(report(findings))
    return int(any(not finding.ok for finding in findings))


def machine_findings() -> list[Finding]:
    facts = machine.read_machine()
    return [check(facts) for check in machine.CHECKS]


def server_findings(url: str, api_key: str | None) -> list[Finding]:
    client = ApiClient(url, api_key=api_key, timeout=30.0)
    status = client.call("GET", "/v1/status")
    with client.content("/metrics") as stream:
        metrics = server.parse_metrics(stream.read().decode())
    ready = client.call("GET", "/ready") if status["state"] == "ready" else {}
    facts = server.ServerFacts(status=status, ready=ready, metrics=metrics)
    return [*(check(facts) for check in server.CHECKS), *server.time_findings(facts)]


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
