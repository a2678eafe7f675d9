"""POST /tokenize and /detokenize: what the model is really given, and the way back."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from headrace.errors import InvalidRequest
from headrace.server.body import decode_object
from headrace.server.parse import token_ids
from headrace.server.parse_chat import chat_turn
from headrace.server.schema import DetokenizeBody, TokenizeBody, validate
from headrace.server.service import LoadedModel, Service
from headrace.server.text_route import TextRoute


def tokenize(body: bytes, service: Service, model: LoadedModel, tenant: str) -> dict[str, Any]:
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


def detokenize(body: bytes, service: Service, model: LoadedModel, tenant: str) -> dict[str, Any]:
    checked = validate(DetokenizeBody, decode_object(body))
    service.check_model_name(checked.model)
    ids = token_ids(checked.tokens, model.vocab_size, "tokens")
    return {"prompt": model.tokenizer.decode(list(ids), skip_special_tokens=False)}


def routes(service: Service) -> list[Route]:
    return [
        Route("/tokenize", TextRoute(service, tokenize), methods=["POST"]),
        Route("/detokenize", TextRoute(service, detokenize), methods=["POST"]),
    ]
