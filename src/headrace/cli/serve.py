"""`headrace serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from headrace.cli.options import SERVE_GROUPS, add_options
from headrace.cli.settings import MODEL_KEY, engine_options, merge, read_config_file, server_config
from headrace.config import EngineConfig

EPILOG = """\
examples:
  headrace serve
  headrace serve ./model.gguf --max-model-len 4k --kv-memory 1GiB
  headrace serve owner/model --host 0.0.0.0 --api-key SECRET --served-model-name my-model
  headrace serve --config serve.yaml --port 9000

serve.yaml holds flags as keys, with - or _; a flag on the command line wins over the file:
  model: owner/model
  max-num-seqs: 32
  enable-prefix-caching: true

The server is up when GET /ready answers 200. SIGTERM lets running requests finish (--shutdown-timeout); a second one forces.
"""


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "serve",
        usage="headrace serve [MODEL] [FLAGS]",
        help="serve a model over an OpenAI-compatible API",
        description="Serve a model over an OpenAI-compatible HTTP API.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="GGUF file, Hugging Face directory or hub name (owner/model); default: SmolLM2-135M-Instruct"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags as keys; flags on the command line win over it")
    add_options(parser, SERVE_GROUPS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    file = read_config_file(args.config) if args.config else {}
    settings = merge(args, file)
    server = server_config(settings)
    options = engine_options(settings)
    EngineConfig(model="", **options)  # a wrong flag is said before a model is fetched
    name = args.model or file.get(MODEL_KEY)
    from headrace.models import store

    # another runner gives the name its own meaning
    path = name or store.DEFAULT_MODEL if "runner_factory" in options else store.resolve_model(name)
    from headrace.engine import engine_process
    from headrace.server.tenants import tenant_weights

    engine = EngineConfig(model=str(path), tenant_weights=tenant_weights(server.limited_keys), **options)
    with engine_process.launch(engine) as launched:  # it loads while this process imports what HTTP takes, a second's work
        from headrace.server import serve

        return serve.run(engine, server, model_name=display_name(name or store.DEFAULT_MODEL), launched=launched)


def display_name(name: str) -> str:
    """What clients call the model: the hub name as it is, of a path only the last part."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.stem if path.is_file() else path.resolve().name
