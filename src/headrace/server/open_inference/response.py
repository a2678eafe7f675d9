"""Pieces of an answer as `ModelInferResponse`s: the outputs of the model, for one delta or for a whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.server.answer import Piece, Usage
from headrace.server.open_inference import status, wire
from headrace.server.open_inference.parse import VERSION, InferRequest
from headrace.server.open_inference.tensors import add_output
from headrace.server.routes_chat import event_delta
from headrace.server.streaming import encode
from headrace.text.answer_events import ContentText, ReasoningText, ToolCallArguments, ToolCallBegin

# name -> (datatype, size; -1: any); one element a choice where nothing else is said
OUTPUTS = {
    "text_output": ("BYTES", -1),
    "output_ids": ("INT64", -1),  # of all choices, one after the other
    "output_lengths": ("INT64", -1),  # how many of output_ids are of each choice
    "index": ("INT64", -1),  # which choice
    "finish_reason": ("BYTES", -1),  # empty while the choice goes on
    "prompt_tokens": ("INT64", 1),  # these three of all choices together, in the last response
    "completion_tokens": ("INT64", 1),
    "cached_tokens": ("INT64", 1),
    "stop_reason": ("BYTES", -1),  # JSON; these where there is something to say, or where they are asked for
    "reasoning_content": ("BYTES", -1),
    "tool_calls": ("BYTES", -1),  # JSON: as OpenAI has them, whole or as deltas
    "logprobs": ("BYTES", -1),  # JSON: as completions or chats have them
    "prompt_logprobs": ("BYTES", -1),  # JSON
}
FINAL = "triton_final_response"


def delta_response(request: InferRequest, piece: Piece, usage: Usage, *, final: bool) -> Any:
    """What is new of a choice; `final`: nothing comes after it."""
    wrapped = wire.ModelStreamInferResponse()
    response = wrapped.infer_response
    _fill(response, request, [_delta(piece, request)], usage if final else None)
    response.parameters[FINAL].bool_param = final
    return wrapped


def whole_response(request: InferRequest, pieces: Sequence[Piece], usage: Usage) -> Any:
    """The whole answer."""
    by_choice: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_choice.setdefault(piece.index, []).append(piece)
    response = wire.ModelInferResponse()
    form = request.form(request.parsed)
    _fill(response, request, [_whole(form.choice(by_choice[index])) for index in sorted(by_choice)], usage)
    return response


def final_response(whole: Any) -> Any:
    """A whole answer as the only response of a stream."""
    wrapped = wire.ModelStreamInferResponse(infer_response=whole)
    wrapped.infer_response.parameters[FINAL].bool_param = True
    return wrapped


def error_response(request_id: str, error: RequestError) -> Any:
    """The last response to one request of a stream; the others go on."""
    wrapped = wire.ModelStreamInferResponse(error_message=status.message_of(error) or "The request failed.")
    response = wrapped.infer_response
    response.id = request_id
    parameters = {"grpc-status": status.code_of(error).name, **status.facts(error)}
    for name, value in parameters.items():
        response.parameters[name].string_param = value
    seconds = status.retry_seconds(error)
    if seconds is not None:
        response.parameters["retry-after"].int64_param = seconds
    response.parameters[FINAL].bool_param = True
    return wrapped


def _delta(piece: Piece, request: InferRequest) -> dict[str, Any]:
    """The outputs of a piece; of a chat, from its events."""
    found = {
        "text_output": piece.text,
        "output_ids": piece.token_ids,
        "index": piece.index,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "logprobs": piece.logprobs or None,
    }
    if request.chat:
        found["text_output"] = "".join(event.text for event in piece.events if isinstance(event, ContentText))
        found["reasoning_content"] = "".join(event.text for event in piece.events if isinstance(event, ReasoningText))
        calls = [event for event in piece.events if isinstance(event, ToolCallBegin | ToolCallArguments)]
        found["tool_calls"] = [event_delta(event)["tool_calls"][0] for event in calls] or None
    return found


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    """The outputs of a choice as the form of its route has it."""
    message = choice.get("message", {})
    return {
        "text_output": choice["text"] if "text" in choice else message["content"],
        "output_ids": choice["token_ids"],
        "index": choice["index"],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": message.get("tool_calls"),
        "logprobs": choice["logprobs"],
        "prompt_logprobs": choice.get("prompt_logprobs"),
    }


def _fill(response: Any, request: InferRequest, choices: list[dict[str, Any]], usage: Usage | None) -> None:
    response.id = request.id
    response.model_name = request.parsed.model
    response.model_version = VERSION
    values: dict[str, list[Any]] = {
        "text_output": [choice["text_output"] or "" for choice in choices],
        "output_ids": [token_id for choice in choices for token_id in choice["output_ids"]],
        "output_lengths": [len(choice["output_ids"]) for choice in choices],
        "index": [choice["index"] for choice in choices],
        "finish_reason": [choice["finish_reason"] or "" for choice in choices],
    }
    if usage is not None:
        values["prompt_tokens"] = [usage.prompt_tokens]
        values["completion_tokens"] = [usage.completion_tokens]
        values["cached_tokens"] = [usage.cached_tokens]
    reasoning = [choice.get("reasoning_content") or "" for choice in choices]
    if any(reasoning) or "reasoning_content" in request.outputs:
        values["reasoning_content"] = reasoning
    for name in ("stop_reason", "tool_calls", "logprobs", "prompt_logprobs"):
        found = [choice.get(name) for choice in choices]
        if name in request.outputs or any(value is not None for value in found):
            values[name] = [encode(value).decode() for value in found]
    for name in request.outputs or values:
        if name in values:
            add_output(response, name, OUTPUTS[name][0], values[name], raw=request.raw)
