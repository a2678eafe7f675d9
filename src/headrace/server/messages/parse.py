"""From a body of /v1/messages to what is generated."""

from __future__ import annotations

import dataclasses

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.server.body import decode_object
from headrace.server.chat_turn import ChatTurn, ReasoningOptions, TemplateOptions, TurnFields, prepare_turn
from headrace.server.messages.blocks import read_conversation
from headrace.server.messages.schema import UNSUPPORTED, ConversationBody, MessageBody
from headrace.server.messages.tools import read_choice, read_tool
from headrace.server.parse import ParsedRequest, Prompt, fit, sampling_params
from headrace.server.schema import validate
from headrace.server.service import LoadedModel, Service
from headrace.server.structured import json_schema_format
from headrace.server.tool_list import read_tools
from headrace.server.unsupported import refuse_unsupported

FIELDS = TurnFields(
    tool_name="tools[{}].name", tool_parameters="tools[{}].input_schema", budget="thinking.budget_tokens", effort="output_config.effort"
)


def parse_message(data: bytes, service: Service, model: LoadedModel) -> ParsedRequest:
    """Thread-safe. Raises `RequestError`."""
    fields = decode_object(data)
    refuse_unsupported(fields, UNSUPPORTED)
    body = validate(MessageBody, fields)
    name = service.check_model_name(body.model)
    if not body.max_tokens:
        raise InvalidRequest("max_tokens is required: a whole number of at least 1.", param="max_tokens")
    params = sampling_params(body, model, max_tokens=body.max_tokens, limit_field="max_tokens", logprobs=None)
    stops = stop_sequences(body)
    turn = make_turn(body, model, bounded=True)
    params = dataclasses.replace(turn.apply(params), stop=stops)
    fitted = fit(turn.prompt_token_ids, params, model, default=None, limit_field="max_tokens", prompt_field="messages")
    return ParsedRequest(
        model=name,
        prompt_field="messages",
        prompts=(Prompt(token_ids=turn.prompt_token_ids, params=fitted, new_parser=turn.new_parser, new_counter=turn.new_counter),),
        stream=bool(body.stream),
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
    )


def count_tokens(data: bytes, service: Service, model: LoadedModel) -> int:
    """Tokens of the prompt that the body would make."""
    fields = decode_object(data)
    refuse_unsupported(fields, UNSUPPORTED)
    body = validate(ConversationBody, fields)
    service.check_model_name(body.model)
    return len(make_turn(body, model, bounded=False).prompt_token_ids)


def stop_sequences(body: MessageBody) -> tuple[str, ...]:
    stops = tuple(body.stop_sequences or ())
    if any(not stop for stop in stops):
        raise InvalidRequest("stop_sequences must not hold an empty text.", param="stop_sequences")
    return stops


def make_turn(body: ConversationBody, model: LoadedModel, *, bounded: bool) -> ChatTurn:
    messages = read_conversation(body.messages, body.system)
    choice, parallel = read_choice(body.tool_choice)
    last = messages[-1]
    return prepare_turn(
        model,
        messages=messages,
        # an answer that has been begun is gone on with
        template=TemplateOptions(template=model.template, continue_final_message=last.role == "assistant" and not last.tool_calls),
        tools=read_tools(body.tools, read_tool),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        structured=output_form(body),
        reasoning=reasoning_options(body),
        bounded=bounded,
        fields=FIELDS,
    )


def output_form(body: ConversationBody) -> StructuredOutputs | None:
    """The form that `output_config.format` asks for."""
    form = body.output_config.format if body.output_config is not None else None
    return None if form is None else json_schema_format({"schema": form.form_schema}, "output_config.format")


def reasoning_options(body: ConversationBody) -> ReasoningOptions:
    """Without `thinking` there is none in the answer: clients that did not ask for it take the first block for the text."""
    effort = body.output_config.effort if body.output_config is not None else None
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        if effort is not None:
            raise InvalidRequest("output_config.effort is allowed only together with thinking.", param="output_config.effort")
        return ReasoningOptions(include=False, effort="none")
    if (thinking.budget_tokens is not None) != (thinking.type == "enabled"):
        raise InvalidRequest("thinking.budget_tokens is required with type enabled, and allowed with no other type.", param="thinking.budget_tokens")
    return ReasoningOptions(budget=thinking.budget_tokens, effort=effort)
