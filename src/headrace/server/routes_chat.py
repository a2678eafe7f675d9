"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from headrace.core.messages import TokenLogprobs
from headrace.server.answer import Piece, Scorer
from headrace.server.body import decode_object
from headrace.server.chat_prompt import render_prompt
from headrace.server.choices import ChoicesDialect
from headrace.server.generation_route import GenerationRoute
from headrace.server.logprobs import chat_entries
from headrace.server.parse import ParsedRequest, Prompt, parse_chat
from headrace.server.schema import ChatBody, validate
from headrace.server.service import LoadedModel, Service


class ChatForm:
    """Choices as OpenAI's chat completions have them, with vLLM's additions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, request: ParsedRequest) -> None:
        self._request = request

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The role first and alone, then what the piece holds, then the reason for the end, alone again."""
        choices = []
        if piece.opens:
            opening = self._chunk(piece, {"role": "assistant", "content": ""})
            if piece.prompt_token_ids is not None:
                opening["prompt_token_ids"] = piece.prompt_token_ids
            choices.append(opening)
        if piece.text or piece.logprobs or piece.token_ids:
            content = self._chunk(piece, {"content": piece.text})
            content["logprobs"] = self._logprobs(piece.logprobs)
            if self._request.return_token_ids:
                content["token_ids"] = piece.token_ids
            choices.append(content)
        if piece.finish_reason is not None:
            choices.append({**self._chunk(piece, {}), "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason})
        return choices

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        entries = [entry for piece in pieces for entry in piece.logprobs or ()]
        choice = {
            "index": pieces[0].index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(entries if self._request.logprobs is not None else None),
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
            choice["prompt_token_ids"] = pieces[0].prompt_token_ids
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = pieces[0].prompt_logprobs
        return choice

    @staticmethod
    def _chunk(piece: Piece, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}

    @staticmethod
    def _logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        return None if entries is None else {"content": entries, "refusal": None}


def new_scorers(request: ParsedRequest, model: LoadedModel) -> Callable[[Prompt], Scorer] | None:
    count = request.logprobs
    if count is None:
        return None

    def score(new: tuple[TokenLogprobs, ...], prompt_scores: tuple[TokenLogprobs, ...] | None) -> list[dict[str, Any]]:
        return chat_entries(new, model.token_texts, count)

    return lambda prompt: score


def parse(body: bytes, service: Service, model: LoadedModel) -> ParsedRequest:
    checked = validate(ChatBody, decode_object(body))
    name = service.check_model_name(checked.model)
    bounded = checked.truncate_prompt_tokens is None
    ids, last_text = render_prompt(checked, model, trust_request=service.config.trust_request_chat_template, bounded=bounded)
    return parse_chat(checked, model, name, ids, last_text)


def routes(service: Service) -> list[Route]:
    endpoint = GenerationRoute(service, ChoicesDialect(ChatForm, parse=parse, new_scorers=new_scorers))
    return [Route("/v1/chat/completions", endpoint, methods=["POST"])]
