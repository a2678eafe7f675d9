"""GET and POST /v1/cache/explain: why a prompt would be found in the prefix cache now, or would not."""

from __future__ import annotations

import urllib.parse
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.core.explain import Explanation
from headrace.errors import InvalidRequest
from headrace.server.body import decode_object, read_body
from headrace.server.generation_route import until_disconnect
from headrace.server.parse import encode_prompt, prompt_list
from headrace.server.parse_chat import chat_turn
from headrace.server.schema import ExplainBody, validate
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import send_json

MESSAGES = {
    "cached": "All full blocks of the prompt are cached.",
    "caching_off": "Prefix caching is off (--no-enable-prefix-caching).",
    "below_one_block": "The prompt is shorter than one block; only full blocks are cached.",
    "being_computed": "Another request computes the missing block now; a request with this prompt would wait for it.",
    "evicted": "The missing block was cached and had to make room for others.",
    "other_salt": "The missing block is cached under another cache_salt, which this one does not share with.",
    "never_seen": "The missing block is not cached, and no recent eviction of it is known.",
}


class ExplainRoute:
    """An ASGI application. The question is admitted, bounded and offloaded as a request that generates is."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        model = service.model()
        config = service.config
        with service.bodies.lease() as lease:
            body = await read_body(receive, Headers(scope=scope), max_bytes=config.max_body_bytes, timeout=config.body_timeout, lease=lease)
            with service.admission.permit():
                if body or scope["method"] == "POST":
                    work = service.offload(len(body), lambda: parse_query(decode_object(body), service, model))
                else:
                    text = scope["query_string"]
                    work = service.offload(len(text), lambda: parse_query(query_object(text), service, model))
                name, ids, salt = await until_disconnect(receive, work)
                question = service.engine.explain(ids, cache_salt=salt, tenant=scope["state"]["tenant"])
                explanation = await until_disconnect(receive, question)
        await send_json(send, explanation_object(explanation, model, name))


def query_object(query: bytes) -> dict[str, Any]:
    """The body that a query string stands for; each field is a text."""
    pairs = urllib.parse.parse_qsl(query.decode("latin-1"), keep_blank_values=True, errors="strict")
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidRequest("A field stands twice in the query string; give it once.")
    return fields


def parse_query(body: dict[str, Any], service: Service, model: LoadedModel) -> tuple[str, tuple[int, ...], str | None]:
    """The name to answer under, the prompt and its salt."""
    checked = validate(ExplainBody, body)
    name = service.check_model_name(checked.model)
    if (checked.prompt is None) == (checked.messages is None):
        raise InvalidRequest("Either prompt or messages is required, and not both.", param="prompt")
    if checked.prompt is None:
        param = "messages"
        ids = chat_turn(checked, model, trust_request=service.config.trust_request_chat_template, bounded=True).prompt_token_ids
    else:
        param = "prompt"
        special = checked.add_special_tokens is not False
        prompts = prompt_list(checked.prompt, model, lambda text: encode_prompt(text, model, add_special_tokens=special, bounded=True), limit=1)
        ids = prompts[0][0]
    if not ids:
        raise InvalidRequest(f"{param} must hold at least one token.", param=param)
    return name, ids, checked.cache_salt


def explanation_object(found: Explanation, model: LoadedModel, name: str) -> dict[str, Any]:
    complete = found.reason == "cached"
    difference = found.difference
    return {
        "object": "cache.explanation",
        "model": name,
        "num_tokens": found.num_tokens,
        "block_size": found.block_size,
        "cached_blocks": found.cached_blocks,
        "cached_tokens": found.cached_tokens,
        "first_missing_block": None if complete else found.cached_blocks,
        "reason": found.reason,
        "message": MESSAGES[found.reason],
        "first_difference": None
        if difference is None
        else {
            "position": difference.position,
            "cached": token_object(difference.cached_token_id, model),
            "prompt": token_object(difference.prompt_token_id, model),
        },
        "evicted_seconds_ago": None if found.evicted_s is None else round(found.evicted_s, 3),
        "awaited_tokens": found.awaited_tokens,
    }


def token_object(token_id: int, model: LoadedModel) -> dict[str, Any]:
    return {"id": token_id, "token": model.token_texts.text_of(token_id)}


def routes(service: Service) -> list[Route]:
    return [Route("/v1/cache/explain", ExplainRoute(service), methods=["GET", "POST"])]
