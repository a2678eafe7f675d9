"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Route

from headrace.core.messages import TokenLogprobs
from headrace.server.answer import Piece, Scorer
from headrace.server.body import decode_object
from headrace.server.choices import ChoicesDialect
from headrace.server.generation_route import GenerationRoute
from headrace.server.logprobs import chat_entries
from headrace.server.parse import ParsedRequest, Prompt
from headrace.server.parse_chat import chat_turn, parse_chat
from headrace.server.schema import ChatBody, validate
from headrace.server.service import LoadedModel, Service
from headrace.text.answer_events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallBegin


def event_delta(event: Event) -> dict[str, Any]:
    """What a chunk says of an event."""
    match event:
        case ContentText():
            return {"content": event.text}
        case ReasoningText():
            return {"reasoning_content": event.text}
        case ToolCallBegin():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case ToolCallArguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


@dataclass(slots=True)
class AnswerMessage:
    """The events of a choice, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> AnswerMessage:
        message = cls()
        for event in events:
            match event:
                case ContentText():
                    message.content += event.text
                case ReasoningText():
                    message.reasoning += event.text
                case ToolCallBegin():
                    message.calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
                case ToolCallArguments():
                    message.calls[event.index]["function"]["arguments"] += event.text
        return message

    def body(self) -> dict[str, Any]:
        """Null content beside calls, as OpenAI has it."""
        body: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else ""), "refusal": None}
        if self.reasoning:
            body["reasoning_content"] = self.reasoning
        if self.calls:
            body["tool_calls"] = self.calls
        return body


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
        deltas = [event_delta(event) for event in piece.events]
        if not deltas and (piece.logprobs or piece.token_ids):
            deltas = [{"content": ""}]  # tokens without text so far
        for position, delta in enumerate(deltas):
            choice = self._chunk(piece, delta)
            choice["logprobs"] = self._logprobs(piece.logprobs if position == 0 else None)
            if self._request.return_token_ids:
                choice["token_ids"] = piece.token_ids if position == 0 else ()
            choices.append(choice)
        if piece.finish_reason is not None:
            choices.append({**self._chunk(piece, {}), "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason})
        return choices

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        message = AnswerMessage.of(event for piece in pieces for event in piece.events)
        entries = [entry for piece in pieces for entry in piece.logprobs or ()]
        choice = {
            "index": pieces[0].index,
            "message": message.body(),
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
    turn = chat_turn(checked, model, trust_request=service.config.trust_request_chat_template, bounded=bounded)
    return parse_chat(checked, model, name, turn)


def routes(service: Service) -> list[Route]:
    endpoint = GenerationRoute(service, ChoicesDialect(ChatForm, parse=parse, new_scorers=new_scorers))
    return [Route("/v1/chat/completions", endpoint, methods=["POST"])]
