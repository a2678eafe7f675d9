"""The OpenAPI document is complete, and what the server does is what it says: schemathesis asks a server on fakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import jsonschema
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.routing import Route

from headrace.server.openapi.document import registered
from headrace.server.openapi.operations import OPERATIONS
from headrace.server.protocol import BoundedHttpProtocol
from headrace.server.serve import HttpServer, listen
from headrace.text.tokenizer import Tokenizer
from tests.patience import LIMIT_S
from tests.server.fakes import World, events

SECONDS = float(os.environ.get("HEADRACE_SCHEMATHESIS_SECONDS", "8"))  # of the test that asks at random
CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)


@pytest.fixture
async def world(tokenizer: Tokenizer, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(tokenizer, batch_folder=tmp_path / "batches", **getattr(request, "param", {}))
    yield world
    await world.close()


async def test_every_route_is_in_the_document_and_nothing_else(world: World):
    document = (await world.http.get("/openapi.json")).json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    routes = world.app.routes
    assert all(isinstance(route, Route) for route in routes)
    assert described == set(registered(routes)) == set(OPERATIONS)
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))
    assert all("security" not in operation for methods in document["paths"].values() for operation in methods.values())


async def test_every_reference_leads_somewhere_and_every_schema_is_one(world: World):
    document = (await world.http.get("/openapi.json")).json()

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (value["$ref"],) if isinstance(value.get("$ref"), str) else ()
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from references(item)

    found = set(references(document))
    for reference in found:
        part: Any = document
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]
    for kind in ("schemas", "responses", "headers"):
        for name, schema in document["components"][kind].items():
            if kind == "schemas":
                jsonschema.Draft202012Validator.check_schema(schema)
            unused = {"CompletionChunk", "ChatCompletionChunk", "ResponseEvent", "MessageEvent"}  # named in words: OpenAPI has none for streams
            assert f"#/components/{kind}/{name}" in found or name in unused or kind == "responses", name


@pytest.mark.parametrize("world", [{"api_keys": ("sk-1",)}], indirect=True)
async def test_the_document_says_which_routes_need_a_key(world: World):
    assert (await world.http.get("/openapi.json")).status_code == 401
    document = (await world.http.get("/openapi.json", headers={"x-api-key": "sk-1"})).json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path not in ("/health", "/ready")), path


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 2, "return_token_ids": True}, "CompletionChunk"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "ChatCompletionChunk"),
    ],
)
async def test_events_are_what_the_document_says(world: World, path: str, body: dict[str, Any], schema: str):
    document = (await world.http.get("/openapi.json")).json()
    response = await world.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12})
    chunks = events(response.text)
    assert len(chunks) > 10
    for chunk in chunks[:-1]:
        jsonschema.validate(chunk, {"$ref": f"#/components/schemas/{schema}", "components": document["components"]})


CHAT = [{"role": "user", "content": "x"}]
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
GOOD: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", {"prompt": ["x", "y"], "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1, "max_tokens": 3}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "logprobs": True, "return_token_ids": True, "max_tokens": 3}),
    ("POST", "/v1/responses", {"input": "x", "max_output_tokens": 3}),
    ("POST", "/v1/responses/input_tokens", {"input": "x"}),
    ("GET", "/v1/responses/{response_id}", None),
    ("GET", "/v1/responses/{response_id}/input_items", None),
    ("DELETE", "/v1/responses/{response_id}", None),
    ("POST", "/v1/messages", {"messages": CHAT, "max_tokens": 3}),
    ("POST", "/v1/messages/count_tokens", {"messages": CHAT}),
    ("POST", "/v1/embeddings", {"input": [[1, 2], [3]]}),
    ("POST", "/tokenize", {"messages": CHAT, "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [104]}),
    ("POST", "/v1/cache/explain", {"prompt": "abc"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{name}", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
    ("POST", "/debug/trace", None),
    ("POST", "/v1/files", None),
    ("GET", "/v1/files", None),
    ("GET", "/v1/files/{file_id}", None),
    ("POST", "/v1/batches", {"endpoint": "/v1/completions", "completion_window": "24h"}),
    ("GET", "/v1/batches", None),
    ("GET", "/v1/batches/{batch_id}", None),
]


async def test_good_answers_are_what_the_document_says(world: World):
    document = (await world.http.get("/openapi.json")).json()
    ids: dict[str, str] = {"name": "tiny"}
    for method, path, fields in GOOD:
        body = fields
        if path == "/v1/files" and method == "POST":
            response = await world.http.post(path, files={"file": ("a.jsonl", json.dumps(LINE))}, data={"purpose": "batch"})
        else:
            if path == "/v1/batches" and method == "POST":
                body = fields | {"input_file_id": ids["file_id"]}
            response = await world.http.request(method, path.format(**ids), json=body)
        assert response.status_code == 200, (path, response.text)
        answer = response.json()
        if method == "POST" and path in ("/v1/responses", "/v1/files", "/v1/batches"):
            ids[f"{answer['object']}_id"] = answer["id"]
        described = document["paths"][path][method.lower()]
        schema = described["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, {**schema, "components": document["components"]})
        if body is not None:  # and the request was one that the document allows
            asked = described["requestBody"]["content"]["application/json"]["schema"]
            jsonschema.validate(body, {**asked, "components": document["components"]})


class Server:
    """A world behind a port, in a thread of its own."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._started = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.url = ""

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._started.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        world = World(self._tokenizer, batch_folder=self._folder, body_timeout=5.0)
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            world.app, http=BoundedHttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        server = HttpServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        self._started.set()
        await asyncio.to_thread(self._stop.wait)
        server.should_exit = True
        await serving
        await world.close()


@pytest.mark.slow
def test_the_server_does_what_the_document_says(tokenizer: Tokenizer, tmp_path: Path):
    """For `SECONDS`, shared out between the operations. Bodies from the document and bodies that break it; no 5xx, nothing undocumented."""
    with Server(tokenizer, tmp_path / "batches") as server:
        document = httpx.get(f"{server.url}/openapi.json", timeout=LIMIT_S, trust_env=False).json()
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=server.url)
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) == len(OPERATIONS)
        counts = {}
        for operation in operations:
            counts[operation.label] = ask(operation, SECONDS / len(operations))
        assert min(counts.values()) >= 1, counts
        assert httpx.get(f"{server.url}/ready", timeout=LIMIT_S, trust_env=False).json()["status"] == "ready"


def ask(operation: Any, seconds: float) -> int:
    """How many requests were sent and answered as the document says."""
    deadline = time.monotonic() + seconds
    count = 0
    modes = list(schemathesis.GenerationMode)
    strategies = [operation.as_strategy(generation_mode=mode) for mode in modes]

    @hypothesis.given(case=hypothesis.strategies.one_of(strategies))
    @hypothesis.settings(max_examples=100_000, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def run(case: Any) -> None:
        nonlocal count
        if time.monotonic() > deadline and count > 2:
            raise TimeUp
        case.call_and_validate(checks=CHECKS, timeout=LIMIT_S)
        count += 1

    with contextlib.suppress(TimeUp):
        run()
    return count


class TimeUp(Exception):
    """The operation had its part of the time."""
