"""What the operator sees when the server is ready: what serves, how large it is, and a request to paste."""

from __future__ import annotations

import json
import shlex
from typing import Any

from headrace import __version__
from headrace.server.service import LoadedModel, Service


def ready_message(service: Service, model: LoadedModel, *, url: str, secured: bool, grpc_address: str | None = None) -> str:
    info = model.info
    tokens = info.num_blocks * info.block_size
    name = service.model_names[0]
    path: str
    body: dict[str, Any]
    if model.template.source is not None:
        path, body = "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    else:
        path, body = "/v1/completions", {"model": name, "prompt": "The capital of France is", "max_tokens": 16}
    body["temperature"] = 0  # the same answer for everyone who pastes it
    key = " \\\n    -H 'Authorization: Bearer YOUR_API_KEY'" if secured else ""
    grpc_line = "" if grpc_address is None else f"  gRPC     {grpc_address}, the Open Inference Protocol\n"
    page_line = f"  page     {url}/, for browsers\n" if service.config.web else ""
    return (
        f"headrace {__version__} is ready at {url}\n"
        f"  model    {name}, {info.dtype} on {info.device}, {info.threads} threads, loaded in {info.load_seconds:.1f} s\n"
        f"  path     {info.path}\n"
        f"  context  {info.max_model_len} tokens; the KV cache holds {tokens} tokens ({info.kv_bytes / 2**20:.0f} MiB of {info.kv_cache_dtype})\n"
        f"{grpc_line}{page_line}"
        "  try\n"
        f"    curl {url}{path} \\\n"
        f"    -H 'Content-Type: application/json'{key} \\\n"
        f"    -d {shlex.quote(json.dumps(body))}"
    )
