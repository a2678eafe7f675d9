"""One turn of a conversation, whichever route it came by: what the model is given, what holds its answer, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.server.chat_prompt import template_message
from headrace.server.parse import check_least_length
from headrace.server.schema import Message
from headrace.server.service import LoadedModel
from headrace.text.answer_events import AnswerParser, PlainParser
from headrace.text.chat_template import ChatTemplate
from headrace.text.tools import FunctionTool, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """How the messages become a prompt."""

    template: ChatTemplate  # see `chat_prompt.choose_template`
    kwargs: Mapping[str, Any] | None = None  # more variables for it
    add_generation_prompt: bool | None = None  # open the assistant's turn; None: unless the last message is continued
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """What is wanted of the model's thinking."""

    include: bool = True  # false: it is thought and counted, but not returned
    budget: int | None = None  # most tokens of reasoning; then its end is forced
    effort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFields:
    """What the route's body calls the fields, for the errors that name them."""

    messages: str = "messages"
    tools: str = "tools"
    tool_name: str = "tools[{}].function.name"  # {}: the tool's index
    tool_parameters: str = "tools[{}].function.parameters"
    tool_choice: str = "tool_choice"
    budget: str = "thinking_token_budget"
    effort: str = "reasoning_effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """What a route generates from."""

    prompt_token_ids: tuple[int, ...]
    structured: StructuredOutputs | None  # for `SamplingParams.structured`: the whole raw text of the answer keeps it
    new_parser: Callable[[], AnswerParser]  # one for each choice; it is given the raw text of the answer
    last_text: str  # of the last message if it is the assistant's; an echo puts it before the answer, unparsed


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

    `tool_choice` None is auto where there are tools. Raises `InvalidRequest`, which names a field as `fields` calls it.
    """
    fields = fields or TurnFields()
    if tools or tool_choice is not None or reasoning not in (None, ReasoningOptions()):
        raise InvalidRequest("Tool calls are not supported by this version; leave tools out.", param=fields.tools, code="unsupported_value")
    if bounded:
        check_least_length(sum(map(text_length, messages)), model, fields.messages)
    begin = not template.continue_final_message if template.add_generation_prompt is None else template.add_generation_prompt
    turns = [template_message(message) for message in messages]
    try:
        ids = template.template.render_ids(
            turns, add_generation_prompt=begin, continue_final_message=template.continue_final_message, kwargs=template.kwargs
        )
    except InvalidRequest as error:
        if error.param == "messages":  # the template does not know what the body calls them
            error.param = fields.messages
        raise
    last = turns[-1]
    return ChatTurn(
        prompt_token_ids=tuple(ids),
        structured=structured,
        new_parser=PlainParser,
        last_text=(last["content"] or "") if last["role"] == "assistant" else "",
    )


def text_length(message: Message) -> int:
    """Characters of the content."""
    content = message.content
    return len(content or "") if content is None or isinstance(content, str) else sum(len(part.text) for part in content)
