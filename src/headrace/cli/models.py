"""`headrace models list | pull | show | verify`: what is on this machine, and is it whole."""

from __future__ import annotations

import argparse
import json
from typing import Any

EPILOG = """\
examples:
  headrace models list
  headrace models pull owner/model      fetch it, print where it lies
  headrace models show ./model.gguf     architecture, context, template... from its metadata
  headrace models verify                hash the default model again

Fetched models lie in $HEADRACE_HOME (default ~/.cache/headrace) and in the hub's own cache.
"""


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "models", help="list, fetch, show and verify models", description="List, fetch, show and verify models.", epilog=EPILOG
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="models that are here, or that come by name")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    listing.set_defaults(run=run_list)
    for name, run, text in (
        ("pull", run_pull, "fetch a model and print its path"),
        ("show", run_show, "what a model says of itself"),
        ("verify", run_verify, "check every weight file, by checksum where one is known"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("model", nargs="?", metavar="MODEL", help="file, directory or hub name; default: SmolLM2-135M-Instruct")
        action.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    from headrace.models import store

    models = store.list_models()
    if args.json:
        for model in models:
            print(json.dumps({"name": model.name, "path": model.path and str(model.path), "size": model.size, "source": model.source}))
        return 0
    width = max(len(model.name) for model in models)
    for model in models:
        default = " (default)" if model.name == store.DEFAULT_MODEL else ""
        print(f"{model.name:{width}}  {model.size / 1e6:9.1f} MB  {model.source:7}  {model.path or 'not fetched yet'}{default}")
    return 0


def run_pull(args: argparse.Namespace) -> int:
    from headrace.models import store

    print(store.resolve_model(args.model))
    return 0


def run_show(args: argparse.Namespace) -> int:
    from headrace.models import store

    for key, value in store.show(store.resolve_model(args.model)).items():
        print(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from headrace.models import store

    for line in store.verify(store.resolve_model(args.model)):
        print(line)
    return 0
