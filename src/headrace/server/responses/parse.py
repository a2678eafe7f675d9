"""From a body of /v1/responses to what is generated, and to the response as it stands before its first token."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.sampling_params import MAX_LOGPROBS, StructuredOutputs
from headrace.server.answer import Header
from headrace.server.body import decode_object
from headrace.server.chat_turn import ChatTurn, ReasoningOptions, TemplateOptions, TurnFields, prepare_turn
from headrace.server.parse import ParsedRequest, Prompt, fit, sampling_params, shown
from headrace.server.responses.items import read_items, to_messages
from headrace.server.responses.schema import UNSUPPORTED, InputBody, ResponseBody
from headrace.server.responses.store import ResponseStore
from headrace.server.responses.tools import read_choice, read_tool
from headrace.server.schema import validate
from headrace.server.service import LoadedModel, Service
from headrace.server.structured import json_schema_format, response_format
from headrace.server.tool_list import read_tools
from headrace.server.unsupported import refuse_unsupported

FIELDS = TurnFields(
    messages="input",
    tool_name="tools[{}].name",
    tool_parameters="tools[{}].parameters",
    budget="reasoning",
    effort="reasoning.effort",
)
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(ParsedRequest):
    """What the route needs beside the generation."""

    body: ResponseBody
    tenant: str
    input_items: list[dict[str, Any]]  # all that the model is given, those of earlier responses first
    store: bool
    background: bool


def parse_response(data: bytes, service: Service, model: LoadedModel, store: ResponseStore, tenant: str) -> ParsedResponse:
    """Thread-safe. Raises `RequestError`."""
    fields = decode_object(data)
    refuse_unsupported(fields, UNSUPPORTED)
    body = validate(ResponseBody, fields)
    name = service.check_model_name(body.model)
    check_together(body)
    logprobs = answer_logprobs(body)
    params = sampling_params(body, model, max_tokens=body.max_output_tokens, limit_field="max_output_tokens", logprobs=logprobs)
    items = all_items(body, store, tenant)
    items, turn = fitting_turn(body, items, model, room=body.max_output_tokens or 1)
    ids = turn.prompt_token_ids
    body.input = None  # a large one is not kept while the answer is made
    fitted = fit(ids, params, model, default=None, limit_field="max_output_tokens", prompt_field="input")
    return ParsedResponse(
        model=name,
        prompt_field="input",
        prompts=(Prompt(token_ids=ids, params=turn.apply(fitted), new_parser=turn.new_parser, new_counter=turn.new_counter),),
        stream=bool(body.stream),
        logprobs=logprobs,
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
        body=body,
        tenant=tenant,
        input_items=items,
        store=body.store is not False,
        background=bool(body.background),
    )


def count_input_tokens(data: bytes, service: Service, model: LoadedModel, store: ResponseStore, tenant: str) -> int:
    """Tokens of the prompt that the body would make."""
    fields = decode_object(data)
    refuse_unsupported(fields, UNSUPPORTED)
    body = validate(InputBody, fields)
    service.check_model_name(body.model)
    return len(make_turn(body, all_items(body, store, tenant), model, bounded=False).prompt_token_ids)


def check_together(body: ResponseBody) -> None:
    """What fields mean together with others."""
    if body.max_output_tokens == 0:
        raise InvalidRequest("max_output_tokens must be at least 1.", param="max_output_tokens")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is allowed only together with stream: true.", param="stream_options")
    if LOGPROBS in (body.include or ()) and body.tools and body.tool_choice != "none":
        raise InvalidRequest(
            f"include: {LOGPROBS} is not supported together with tools; leave one of them out, or set tool_choice to none.",
            param="include",
            code="unsupported_value",
        )
    if body.background and body.store is False:
        raise InvalidRequest("background needs store: the answer is fetched later.", param="background")
    if body.background and body.stream:
        raise InvalidRequest(
            "stream is not supported together with background; leave one of them out, or poll GET /v1/responses/ID.",
            param="stream",
            code="unsupported_value",
        )


def answer_logprobs(body: ResponseBody) -> int | None:
    """How many alternatives are asked for; None: no logprobs at all."""
    wanted = LOGPROBS in (body.include or ())
    count = body.top_logprobs or 0
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {shown(count)}.", param="top_logprobs")
    if count and not wanted:
        raise InvalidRequest(f'top_logprobs is allowed only together with include: ["{LOGPROBS}"].', param="top_logprobs")
    return count if wanted else None


def all_items(body: InputBody, store: ResponseStore, tenant: str) -> list[dict[str, Any]]:
    """The items of the conversation so far, and those of this request."""
    items = read_items(body.input)
    if body.previous_response_id is None:
        return items
    shown_id = body.previous_response_id[:100]
    previous = store.get(tenant, body.previous_response_id)
    if previous is None:
        raise InvalidRequest(
            f"previous_response_id: there is no response {shown_id!r} here; it was not stored, or it was deleted or pushed out by newer ones. "
            "Send the whole conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    response = previous.response
    if response["status"] not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"previous_response_id: the response {shown_id!r} is {response['status']}; only one that has ended can be continued.",
            param="previous_response_id",
        )
    output: list[dict[str, Any]] = response["output"]
    return previous.input_items + output + items


def text_form(body: InputBody) -> StructuredOutputs | None:
    """The form that `text.format` asks for; its schema stands one level higher than in a chat's `response_format`."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.get("type") == "json_schema":
        return json_schema_format({name: value for name, value in form.items() if name != "type"}, "text.format")
    return response_format(form, "text.format")


def make_turn(body: InputBody, items: list[dict[str, Any]], model: LoadedModel, *, bounded: bool) -> ChatTurn:
    tools, choice = read_choice(body.tool_choice, read_tools(body.tools, read_tool))
    effort = body.reasoning.effort if body.reasoning is not None else None
    return prepare_turn(
        model,
        messages=to_messages(items, body.instructions),
        template=TemplateOptions(template=model.template),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        structured=text_form(body),
        reasoning=ReasoningOptions(effort=effort) if effort is not None else None,
        bounded=bounded,
        fields=FIELDS,
    )


def fitting_turn(body: InputBody, items: list[dict[str, Any]], model: LoadedModel, *, room: int) -> tuple[list[dict[str, Any]], ChatTurn]:
    """The items that the model is given, and their turn; where truncation is auto, as many of the oldest items are dropped as must go.

    System and developer messages stay, and so does all from the last user message on.
    """
    if body.truncation != "auto":
        return items, make_turn(body, items, model, bounded=True)
    most = model.info.max_model_len - room
    asked = [index for index, item in enumerate(items) if item.get("role") == "user"]
    droppable = [index for index in range(asked[-1] if asked else 0) if items[index].get("role") not in ("system", "developer")]

    def without(count: int) -> tuple[list[dict[str, Any]], ChatTurn] | None:
        dropped = set(droppable[:count])
        kept = [item for index, item in enumerate(items) if index not in dropped]
        calls = {item["call_id"] for item in kept if item["type"] == "function_call"}
        kept = [item for item in kept if item["type"] != "function_call_output" or item["call_id"] in calls]  # no result without its call
        try:
            turn = make_turn(body, kept, model, bounded=True)
        except ContextLengthExceeded:
            return None
        return (kept, turn) if len(turn.prompt_token_ids) <= most else None

    fitting = without(0)
    if fitting is None:
        least = bisect_left(range(1, len(droppable)), True, key=lambda count: without(count) is not None) + 1
        fitting = without(least)
    return fitting or (items, make_turn(body, items, model, bounded=True))  # where nothing fits, the error has the numbers of the whole


def new_response(request: ParsedResponse, header: Header) -> dict[str, Any]:
    """The response object before its first token."""
    body, params = request.body, request.prompts[0].params
    reasoning = body.reasoning
    return {
        "id": header.answer_id,
        "object": "response",
        "created_at": header.created,
        "completed_at": None,
        "status": "in_progress",
        "background": request.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": header.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier and "default",
        "store": request.store,
        "temperature": params.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
