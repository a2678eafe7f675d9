"""The HTTP side of a rung: completions as they are computed, and where the time went."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.bench.rungs.batch import Job, Worker
from headrace.observe.work_metrics import WorkMetrics
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import Tokenizer

FIELDS = {"model", "prompt", "max_tokens", "stream", "stream_options", "temperature", "ignore_eos"}


def create_app(worker: Worker, tokenizer: Tokenizer, *, model_name: str, max_length: int) -> Starlette:
    registry, metrics = CollectorRegistry(), WorkMetrics()
    registry.register(metrics)

    async def completions(request: Request) -> Response:
        body = json.loads(await request.body())
        if (refused := _refusal(body)) is not None:
            return _error(refused)
        prompt = tokenizer.encode(body["prompt"])
        if len(prompt) + body["max_tokens"] > max_length:
            return _error(f"{len(prompt)} prompt tokens and {body['max_tokens']} more are beyond the model's {max_length}.")
        tokens: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(news: int | Exception | None) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, news)

        worker.submit(Job(prompt=prompt, max_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False), on_token=tell, on_end=tell))
        return StreamingResponse(_events(tokens, IncrementalDetokenizer(tokenizer, continues=True), len(prompt)), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model_name, "object": "model"}]})

    async def show_metrics(request: Request) -> Response:
        metrics.update(worker.work, restarts=0)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def ready(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/metrics", show_metrics),
            Route("/ready", ready),
        ]
    )


async def _events(tokens: asyncio.Queue[int | Exception | None], detokenizer: IncrementalDetokenizer, num_prompt: int) -> AsyncIterator[str]:
    count = 0
    while isinstance(news := await tokens.get(), int):
        count += 1
        yield _event({"choices": [{"index": 0, "text": detokenizer.push([news])}]})
    if news is not None:
        yield _event({"error": {"message": f"{type(news).__name__}: {news}"}})
        return
    usage = {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
    yield _event({"choices": [{"index": 0, "text": detokenizer.finish(), "finish_reason": "length"}]})
    yield _event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _refusal(body: dict[str, Any]) -> str | None:
    """It does what the load asks for, and says so of all else."""
    if unknown := sorted(set(body) - FIELDS):
        return f"{unknown[0]} is not known to this small server; use {', '.join(sorted(FIELDS))}."
    if not body.get("stream") or body.get("temperature", 1.0) != 0.0:
        return "This small server streams the likeliest tokens: use stream true and temperature 0."
    if not isinstance(body.get("prompt"), str) or not body["prompt"] or not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        return "prompt must be a text, max_tokens a whole number of at least 1."
    return None


def _error(message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=400)
