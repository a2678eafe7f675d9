"""The shape of a body of /v1/responses and of the items in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.server.schema import Body, Effort, HarmlessFields, Name, SamplingBody, Word
from headrace.server.unsupported import Rule, never

Status = Literal["in_progress", "completed", "incomplete"]
Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None  # padding against traffic analysis; no answer changes without it


class Reasoning(Strict):
    effort: Effort | None = None
    # the reasoning itself is returned, which is more than a summary of it
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextConfig(Strict):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None  # the default; others are refused


class InputBody(Body):
    """What decides the prompt; the same for answers and for counting tokens."""

    input: Any = None  # a text, or items: checked by `items.read_items`
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextConfig | None = None
    tools: Any = None  # checked by `tool_list.read_tools`
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None


# What comes back with the response, and may be stored, is bounded; so are the prompt's parts, by the context.
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ResponseBody(InputBody, SamplingBody, HarmlessFields):
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    max_output_tokens: int | None = None
    stop: Word | list[Word] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Include] | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None  # of tools that the server would run; it has none


UNSUPPORTED: dict[str, Rule] = {
    "conversation": (never, "conversation is not supported; use previous_response_id."),
    "prompt": (never, "prompt (a stored template) is not supported; write it into input and instructions."),
    "context_management": (never, 'context_management is not supported; truncation "auto" drops the oldest items.'),
    "moderation": (never, "moderation is not supported; leave it out."),
    "image": (never, "image is not supported: this model takes text only."),
    "personality": (never, "personality is not supported; describe it in instructions."),
    "access_programs": (never, "access_programs is not supported; leave it out."),
    "background_options": (never, "background_options is not supported; leave it out."),
}


# -------------------------------------------------------------------------------------------------------------- items


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    # of an answer that comes back; templates have no place for them
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # what the official clients make of the text
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


class Item(Strict):
    id: str | None = None
    status: Status | None = None


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Any  # checked by `items.text_of`
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None  # what the official clients make of the arguments


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Any  # checked by `items.text_of`
    name: str | None = None


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: None = None  # nobody else's can be read here, and ours is in plain text


# -------------------------------------------------------------------------------------------------------------- tools


class FunctionToolBody(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None  # of what the client's function returns; the model is not told
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamedTool(Strict):
    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]
