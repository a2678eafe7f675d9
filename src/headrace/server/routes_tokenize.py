"""POST /tokenize and /detokenize: what the model is really given, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.errors import InvalidRequest
from headrace.server.body import decode_object, read_body
from headrace.server.generation_route import until_disconnect
from headrace.server.parse import token_ids
from headrace.server.parse_chat import chat_turn
from headrace.server.schema import DetokenizeBody, TokenizeBody, validate
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import send_json


def tokenize(body: bytes, service: Service, model: LoadedModel) -> dict[str, Any]:
    checked = validate(TokenizeBody, decode_object(body))
    service.check_model_name(checked.model)
    if (checked.prompt is None) == (checked.messages is None):
        raise InvalidRequest("Either prompt or messages is required, and not both.", param="prompt")
    if checked.prompt is not None:
        ids = tuple(model.tokenizer.encode(checked.prompt, add_special_tokens=checked.add_special_tokens is not False))
    else:
        ids = chat_turn(checked, model, trust_request=service.config.trust_request_chat_template, bounded=False).prompt_token_ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.info.max_model_len, "tokens": ids}
    if checked.return_token_strs:
        answer["token_strs"] = [model.token_texts.text_of(token_id) for token_id in ids]
    return answer


def detokenize(body: bytes, service: Service, model: LoadedModel) -> dict[str, Any]:
    checked = validate(DetokenizeBody, decode_object(body))
    service.check_model_name(checked.model)
    ids = token_ids(checked.tokens, model.vocab_size, "tokens")
    return {"prompt": model.tokenizer.decode(list(ids), skip_special_tokens=False)}


class TokenizeRoute:
    """An ASGI application around one of the functions above."""

    def __init__(self, service: Service, work: Callable[[bytes, Service, LoadedModel], dict[str, Any]]) -> None:
        self._service = service
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        model = service.model()
        config = service.config
        with service.bodies.lease() as lease:
            body = await read_body(receive, Headers(scope=scope), max_bytes=config.max_body_bytes, timeout=config.body_timeout, lease=lease)
            with service.admission.permit():
                answer = await until_disconnect(receive, service.offload(len(body), self._work, body, service, model))
        await send_json(send, answer)


def routes(service: Service) -> list[Route]:
    return [
        Route("/tokenize", TokenizeRoute(service, tokenize), methods=["POST"]),
        Route("/detokenize", TokenizeRoute(service, detokenize), methods=["POST"]),
    ]
