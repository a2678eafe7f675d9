"""The shape of a body of /v1/messages and of the blocks in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.server.schema import INT32, Body, SamplingBody, Word
from headrace.server.unsupported import Rule, never


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class CacheControl(Strict):
    """Where a client wants its prompt cached. Every prefix is cached here, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Metadata(Strict):
    user_id: str | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    display: None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    form_schema: dict[str, Any] = Field(alias="schema")  # `schema` is a method of pydantic's models


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ConversationBody(Body):
    """What decides the prompt; the same for answers and for counting tokens."""

    messages: Any = None  # checked by `blocks.read_messages`
    system: Any = None  # checked by `blocks.read_system`
    tools: Any = None  # checked by `tool_list.read_tools`
    tool_choice: Any = None  # checked by `tools.read_choice`
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    # whose request it is; no answer changes
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessageBody(ConversationBody, SamplingBody):
    max_tokens: int | None = None
    stop_sequences: list[Word] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def _standard(value: Any, body: dict[str, Any]) -> bool:
    return bool(value == "standard")


UNSUPPORTED: dict[str, Rule] = {
    "container": (never, "container is not supported: this server runs no code."),
    "mcp_servers": (never, "mcp_servers is not supported; offer their functions as tools, and run them yourself."),
    "context_management": (never, "context_management is not supported; send the messages that shall count."),
    "diagnostics": (never, "diagnostics is not supported; leave it out."),
    "inference_geo": (never, "inference_geo is not supported: this server is where it is."),
    "speed": (_standard, "speed may only be standard."),
}


# ------------------------------------------------------------------------------------------------------------- blocks


class Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None  # of an answer that comes back; templates have no place for them


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Any = None  # checked by `blocks.text_of`
    is_error: bool | None = None


class MessageShape(Strict):
    role: Literal["user", "assistant", "system"]
    content: Any  # checked by `blocks.read_messages`


# -------------------------------------------------------------------------------------------------------------- tools


class ToolBody(Block):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they are written in any case
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoiceBody(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None
