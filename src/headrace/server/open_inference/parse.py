"""From a `ModelInferRequest` to the same parsed request that a body over HTTP becomes.

Inputs and parameters are the fields of a completion or, where there is an input `messages`, of a chat; they are put together as one body, and
from there all is `validate`, `parse_completion` and `parse_chat`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from google.protobuf.message import DecodeError

from headrace.errors import InvalidRequest, ModelNotFound
from headrace.server.body import decode_json, decode_object
from headrace.server.open_inference.tensors import Tensor, read_tensors
from headrace.server.parse import ParsedRequest, parse_completion
from headrace.server.parse_chat import chat_turn, parse_chat
from headrace.server.routes_chat import ChatForm
from headrace.server.routes_chat import new_scorers as chat_scorers
from headrace.server.routes_completions import CompletionForm
from headrace.server.routes_completions import new_scorers as completion_scorers
from headrace.server.schema import INT32, Body, ChatBody, CompletionBody, validate
from headrace.server.service import LoadedModel, Service

VERSION = "1"  # of the model; there is no other
LIST_FIELDS = frozenset(("stop_token_ids", "allowed_token_ids", "bad_words"))  # a tensor with one element is a list there
PROMPTS = ("text_input", "input_ids", "messages")
ELSEWHERE = {
    "model": "the model is named by model_name",
    "prompt": "the prompt is the input text_input or input_ids",
    "stream_options": "the numbers of tokens are part of every last response",
    "return_token_ids": "output_ids are part of every response",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """What a call asks for."""

    id: str  # the client's own; it comes back in every response
    parsed: ParsedRequest
    chat: bool
    outputs: tuple[str, ...]  # names of those that are wanted; empty: all there are
    raw: bool  # tensors as raw bytes, as the request had them

    @property
    def form(self) -> type[CompletionForm] | type[ChatForm]:
        return ChatForm if self.chat else CompletionForm

    @property
    def new_scorers(self) -> Any:
        return chat_scorers if self.chat else completion_scorers


def decode(kind: Any, data: bytes) -> Any:
    """The message of a kind that bytes hold."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest(f"The message is no {kind.DESCRIPTOR.name}.") from None


def parse(request: Any, service: Service, model: LoadedModel, outputs: Iterable[str], *, stream: bool, seconds_left: float | None) -> InferRequest:
    """Checks a request. Called in any thread; raises `RequestError`.

    `outputs`: names of those there are. `stream`: the call takes several responses. `seconds_left`: until the deadline of the call.
    """
    name = service.check_model_name(request.model_name or None)
    check_version(request.model_version)
    body, prompt_field = body_of(request)
    if body.get("stream") is None:
        body["stream"] = stream
    elif body["stream"] is True and not stream:
        raise InvalidRequest("stream: true needs the call ModelStreamInfer; ModelInfer has one response.", param="stream")
    body["return_token_ids"] = True
    chat = prompt_field == "messages"
    if chat:
        checked = validate(ChatBody, body)
        turn = chat_turn(checked, model, trust_request=service.config.trust_request_chat_template, bounded=checked.truncate_prompt_tokens is None)
        parsed = parse_chat(checked, model, name, turn)
    else:
        try:
            parsed = parse_completion(validate(CompletionBody, body), model, name)
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = prompt_field
            raise
        parsed = dataclasses.replace(parsed, prompt_field=prompt_field)
    if seconds_left is not None and seconds_left * 1000 < (parsed.deadline_ms or INT32):
        parsed = dataclasses.replace(parsed, deadline_ms=max(1, int(seconds_left * 1000)))
    return InferRequest(
        id=request.id,
        parsed=parsed,
        chat=chat,
        outputs=wanted_outputs(request, frozenset(outputs)),
        raw=bool(request.raw_input_contents) or not any(item.HasField("contents") for item in request.inputs),
    )


def check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise ModelNotFound(f"The model has no version {version[:40]!r}; leave it out, or ask for {VERSION}.", param="model_version")


def wanted_outputs(request: Any, known: frozenset[str]) -> tuple[str, ...]:
    names = []
    for item in request.outputs:
        name = item.name[:200]
        if name not in known:
            raise InvalidRequest(f"There is no output {name!r}; there are {', '.join(sorted(known))}.", param="outputs")
        if item.parameters:
            raise InvalidRequest(f"The output {name} cannot have parameters: neither shared memory nor classification is supported.", param=name)
        names.append(name)
    return tuple(dict.fromkeys(names))


def body_of(request: Any) -> tuple[dict[str, Any], str]:
    """The fields of the body, and which input is the prompt."""
    tensors = {tensor.name: tensor for tensor in read_tensors(request)}
    given = [name for name in PROMPTS if name in tensors]
    if len(given) != 1:
        raise InvalidRequest(f"Exactly one of the inputs {', '.join(PROMPTS)} is needed; {len(given)} are given.", param="inputs")
    prompt_field = given[0]
    schema: type[Body] = ChatBody if prompt_field == "messages" else CompletionBody
    body: dict[str, Any] = {}
    if "sampling_parameters" in tensors:
        body |= decode_object(only_text(tensors.pop("sampling_parameters")).encode(), "sampling_parameters")
    for name, parameter in request.parameters.items():
        add_field(body, name, parameter_value(name, parameter), schema)
    prompt = tensors.pop(prompt_field)
    for name, tensor in tensors.items():
        add_field(body, name, tensor_value(tensor), schema)
    for name in body:
        if name in ELSEWHERE:
            raise InvalidRequest(f"{name} is no field here: {ELSEWHERE[name]}.", param=name)
    if prompt_field == "messages":
        body["messages"] = decode_json(only_text(prompt).encode(), "messages")
    else:
        body["prompt"] = prompt_value(prompt)
    return body, prompt_field


def add_field(body: dict[str, Any], name: str, value: Any, schema: type[Body]) -> None:
    """Puts a field into the body under its name there."""
    if isinstance(value, str):
        value = read_text(name, value, schema)
    if name == "timeout":  # Triton's, in microseconds
        name = "deadline_ms"
        value = max(1, math.ceil(value / 1000)) if type(value) is int and value > 0 else value
    elif name == "exclude_input_in_output":
        name, value = "echo", not value if isinstance(value, bool) else value
    elif name == "triton_enable_empty_final_response" and isinstance(value, bool):
        return  # the last response always says that it is the last
    if name in body:
        raise InvalidRequest(f"{name[:200]} is given twice; send it once, as an input or as a parameter.", param=name[:200])
    body[name] = value


def read_text(name: str, value: str, schema: type[Body]) -> Any:
    """A text where the field may be one; else the JSON in it, for parameters cannot be lists, nor, with some clients, fractions."""
    field = schema.model_fields.get(name)
    if field is None or takes_text(field.annotation):
        return value
    if field.annotation is Any and not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return decode_json(value.encode())
    except InvalidRequest:
        raise InvalidRequest(f"{name} must be JSON here, such as a number, true, or a list.", param=name) from None


@cache
def takes_text(annotation: Any) -> bool:
    return annotation is str or isinstance(annotation, str) or any(takes_text(item) for item in get_args(annotation) if not is_container(annotation))


def is_container(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (list, dict)


def parameter_value(name: str, parameter: Any) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidRequest(f"The parameter {name[:200]} has no value.", param=name[:200])
    return getattr(parameter, kind)


def tensor_value(tensor: Tensor) -> Any:
    values = tensor.values
    if tensor.name in LIST_FIELDS or (tensor.name == "stop" and len(values) != 1):
        return values
    if len(values) != 1:
        raise InvalidRequest(f"The input {tensor.name} must hold one element, not {len(values)}.", param=tensor.name)
    return values[0]


def only_text(tensor: Tensor) -> str:
    if len(tensor.values) != 1 or not isinstance(tensor.values[0], str):
        raise InvalidRequest(f"The input {tensor.name} must be one text: BYTES with the shape [1].", param=tensor.name)
    return tensor.values[0]


def prompt_value(tensor: Tensor) -> Any:
    """A text or a list of ids; several of them where the first of two sizes says so."""
    values, name = tensor.values, tensor.name
    is_text = bool(values) and isinstance(values[0], str)
    if is_text != (name == "text_input"):
        raise InvalidRequest("text_input must be BYTES, input_ids INT64 or INT32, with at least one element.", param=name)
    if is_text:
        return values[0] if len(values) == 1 else values
    if len(tensor.shape) == 2:
        width = tensor.shape[1]
        rows = [values[start : start + width] for start in range(0, len(values), width)]
        return rows[0] if len(rows) == 1 else rows
    if len(tensor.shape) != 1:
        raise InvalidRequest("input_ids must have the shape [tokens], or [prompts, tokens].", param=name)
    return values
