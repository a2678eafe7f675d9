"""One turn of a conversation, whichever route it came by: what the model is given, what holds its answer, and what reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling_params import SamplingParams, StructuredOutputs
from headrace.server.chat_prompt import template_message
from headrace.server.chat_reasoning import ReasoningOptions, TurnReasoning
from headrace.server.chat_tools import check_tools
from headrace.server.parse import check_least_length
from headrace.server.schema import Message
from headrace.server.service import LoadedModel
from headrace.server.turn_fields import TurnFields
from headrace.text import tool_formats
from headrace.text.answer_events import AnswerParser, PlainParser
from headrace.text.answer_grammar import FORM_RULE, MAX_CALLS, Calling, SchemaError, answer_grammar, arguments_rule
from headrace.text.chat_template import ChatTemplate
from headrace.text.reasoning import ReasoningCounter
from headrace.text.tool_formats import ToolFormat
from headrace.text.tool_parser import ToolCallParser
from headrace.text.tools import FunctionTool, ToolChoice

PROMPT_END = 32  # tokens in which a template has to open or close the reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """How the messages become a prompt."""

    template: ChatTemplate  # see `chat_prompt.choose_template`
    kwargs: Mapping[str, Any] | None = None  # more variables for it
    add_generation_prompt: bool | None = None  # open the assistant's turn; None: unless the last message is continued
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """What a route generates from."""

    prompt_token_ids: tuple[int, ...]
    structured: StructuredOutputs | None  # the whole raw text of the answer keeps it
    shown_token_ids: tuple[int, ...]  # special tokens that the parser must see
    new_parser: Callable[[], AnswerParser]  # one for each choice; it is given the raw text of the answer
    new_counter: Callable[[], ReasoningCounter] | None  # one for each choice; None: there is no reasoning to count
    last_text: str  # of the last message if it is the assistant's; an echo puts it before the answer, unparsed

    def apply(self, params: SamplingParams) -> SamplingParams:
        """The parameters with what the turn asks of the sampler."""
        return dataclasses.replace(params, structured=self.structured, shown_token_ids=self.shown_token_ids)


def prepare_turn(
    model: LoadedModel,
    *,
    messages: Sequence[Message],
    template: TemplateOptions,
    tools: Sequence[FunctionTool] = (),
    tool_choice: ToolChoice | None = None,
    parallel_tool_calls: bool = True,
    structured: StructuredOutputs | None = None,
    reasoning: ReasoningOptions | None = None,
    bounded: bool = True,
    fields: TurnFields | None = None,
) -> ChatTurn:
    """Renders and tokenises. `bounded`: a text that cannot fit the context is refused before it is tokenised. Thread-safe; may take long.

    `tool_choice` None is auto where there are tools. `structured` holds what the answer says; calls and reasoning may come beside it.
    Raises `InvalidRequest`, which names a field as `fields` calls it.
    """
    fields = fields or TurnFields()
    options = reasoning or ReasoningOptions()
    choice = check_tools(tools, tool_choice, fields)
    offered = [tool.as_openai() for tool in tools] if choice.mode != "none" else []
    if bounded:
        size = sum(map(text_length, messages)) + (len(json.dumps(offered, ensure_ascii=False)) if offered else 0)
        check_least_length(size, model, fields.messages)
    thinking = TurnReasoning(model, template.template, options, budget_field=fields.budget, effort_field=fields.effort)
    ids = _render(messages, offered, template, thinking.template_kwargs(template.kwargs), fields)
    thinking.read_prompt(model.tokenizer.decode(ids[-PROMPT_END:], skip_special_tokens=False))
    calling = _calling(model, template.template, tools, choice, parallel=parallel_tool_calls)
    try:
        grammar = answer_grammar(model.tokenizer, thinking.for_grammar(), calling, structured)
    except SchemaError as error:
        param = fields.tool_parameters.format(error.index)
        raise InvalidRequest(f"{param} cannot be used: {error}.", param=param) from None
    if grammar is not None:
        origins = [(arguments_rule(index), fields.tool_parameters.format(index)) for index in (calling.tools if calling else ())]
        param = fields.tools if calling is not None else fields.budget
        if structured is not None:
            param = structured.param
            origins.append((FORM_RULE, param))
        structured = StructuredOutputs(kind="grammar", source=grammar, param=param, rule_params=tuple(origins))
    names = frozenset(tool.name for tool in tools)

    def new_parser() -> AnswerParser:
        return thinking.wrap(PlainParser() if calling is None else ToolCallParser(calling.format, names))

    markers = (*(calling.format.markers if calling else ()), *thinking.markers)
    special = model.tokenizer.special_tokens
    last = messages[-1] if messages else None
    return ChatTurn(
        prompt_token_ids=tuple(ids),
        structured=structured,
        shown_token_ids=tuple(special[marker] for marker in markers if special.get(marker) in model.tokenizer.skipped_ids),
        new_parser=new_parser,
        new_counter=thinking.new_counter,
        last_text=template_message(last)["content"] or "" if last is not None and last.role == "assistant" else "",
    )


def _render(
    messages: Sequence[Message], tools: list[dict[str, Any]], options: TemplateOptions, kwargs: Mapping[str, Any] | None, fields: TurnFields
) -> list[int]:
    proceed = options.continue_final_message
    begin = not proceed if options.add_generation_prompt is None else options.add_generation_prompt
    turns = [template_message(message) for message in messages]
    try:
        return options.template.render_ids(turns, tools=tools or None, add_generation_prompt=begin, continue_final_message=proceed, kwargs=kwargs)
    except InvalidRequest as error:  # the template does not know what the body calls them
        if error.param == "messages":
            error.param = fields.messages
        elif error.param == "tools":
            error.param = fields.tools
        raise


def _calling(model: LoadedModel, template: ChatTemplate, tools: Sequence[FunctionTool], choice: ToolChoice, *, parallel: bool) -> Calling | None:
    """What the answer may call; None: nothing."""
    if choice.mode == "none":
        return None
    return Calling(
        format=_tool_format(model, template),
        tools={index: tool for index, tool in enumerate(tools) if choice.name in (None, tool.name)},
        required=choice.mode == "required",
        most=1 if choice.name is not None or not parallel else MAX_CALLS,
    )


def _tool_format(model: LoadedModel, template: ChatTemplate) -> ToolFormat:
    name = model.tool_call_parser
    if name == "auto":
        name = tool_formats.format_of_template(template.source if template.supports_tools else None)
    return tool_formats.FORMATS[name]


def text_length(message: Message) -> int:
    """Characters of the content."""
    content = message.content
    return len(content or "") if content is None or isinstance(content, str) else sum(len(part.text) for part in content)
