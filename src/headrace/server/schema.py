"""The shape of the bodies: which fields there are, of which type. Nothing is coerced, nothing unknown is dropped.

Every optional field may be null, which means the same as its absence. Ranges of sampling options are checked by `SamplingParams`; what a
field means together with others is checked in `parse.py`; fields of OpenAI's API that are refused stand in `unsupported.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import InvalidRequest
from headrace.server.structured import StructuredFields
from headrace.server.unsupported import UNSUPPORTED, refuse_unsupported

INT32 = 2**31 - 1

SmallInt = Annotated[int, Field(ge=-INT32 - 1, le=INT32)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Word = Annotated[str, Field(max_length=1024)]  # searched for at each token
Name = Annotated[str, Field(min_length=1, max_length=512)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; no answer changes without it


class SamplingBody(Body):
    """What all generating routes have in common, whosever API they follow."""

    # the sampler
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: int | None = None
    min_p: Finite | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    repetition_penalty: Finite | None = None
    logit_bias: dict[str, Finite] | None = None
    seed: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[Word], Field(max_length=256)] | None = None
    # the end of the answer
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    # the form of the answer
    skip_special_tokens: bool | None = None
    # scheduling and caching
    priority: SmallInt | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=INT32)] | None = None  # to the first token, from the arrival of the request
    cache_salt: Name | None = None
    session_id: Name | None = None


class PromptCacheOptions(BaseModel):
    """When a client wants its prompt cached. Every prefix is cached here, so it changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class HarmlessFields(BaseModel):
    """Fields of OpenAI's API that change no answer."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None


class GenerationBody(SamplingBody, StructuredFields, HarmlessFields):
    """What completions and chats have in common."""

    n: int | None = None
    # the end of the answer
    max_tokens: int | None = None
    stop: Word | list[Word] | None = None
    # the form of the answer
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    # the prompt
    truncate_prompt_tokens: SmallInt | None = None


class CompletionBody(GenerationBody):
    prompt: Any = None  # checked by parse.prompt_list, whose lists may be long
    add_special_tokens: bool | None = None
    logprobs: int | None = None


class EmbeddingBody(Body):
    input: Any = None  # checked by parse.prompt_list
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: SmallInt | None = None
    priority: SmallInt | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=INT32)] | None = None
    cache_salt: Name | None = None
    user: str | None = None  # changes no answer


class BatchBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, str] | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    arguments: str
    parsed_arguments: Any = None  # what the official clients make of the arguments, and send back with the call


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # left over when a client sends back a call it put together from a stream


class Message(BaseModel):
    """One turn. What the template does with `name` and `tool_calls` is its own affair; it is given all of them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier answer, as it was given
    # parts of an answer that clients send back as they got it; always empty in ours
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed: Any = None  # what the official clients make of the content


class ChatOptions(Body):
    """What decides how messages become a prompt; the same for chats and /tokenize."""

    messages: Any = None  # checked by parse.message_list: errors of unions are hard to read
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # only false with messages: the template writes what there is to be
    tools: Any = None  # checked by chat_tools.tool_list
    tool_choice: Any = None  # checked by chat_tools.tool_choice
    reasoning_effort: Effort | None = None


class ChatBody(ChatOptions, GenerationBody):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call
    include_reasoning: bool | None = None  # false: reasoning is counted, but not returned
    thinking_token_budget: Annotated[int, Field(ge=0, le=INT32)] | None = None
    prediction: dict[str, Any] | None = None  # a hint for speed


class TokenizeBody(ChatOptions):
    prompt: str | None = None
    return_token_strs: bool | None = None


class ExplainBody(ChatOptions):
    prompt: Any = None  # checked by parse.prompt_list
    cache_salt: Name | None = None


class DetokenizeBody(Body):
    tokens: Any = None  # checked by parse.token_ids


BodyType = TypeVar("BodyType", bound=BaseModel)

# pydantic's own words where they would puzzle a reader of JSON
MESSAGES = {
    "extra_forbidden": "Unknown field {field!r}; check its spelling, or leave it out.",
    "missing": "{field} is required.",
    "bool_type": "{field} must be true or false.",
    "int_type": "{field} must be a whole number.",
    "float_type": "{field} must be a number.",
    "finite_number": "{field} must be a finite number.",
    "string_type": "{field} must be a text.",
    "list_type": "{field} must be a list.",
    "dict_type": "{field} must be an object.",
    "model_type": "{field} must be an object.",
    "none_required": "{field} must be null or absent.",
}


def validate(body_type: type[BodyType], body: Any, *, prefix: str = "") -> BodyType:
    """A body of the type, or `InvalidRequest` with the first fault; `prefix` stands before the names of fields."""
    if issubclass(body_type, GenerationBody | ChatOptions):
        refuse_unsupported(body, UNSUPPORTED)
    try:
        return body_type.model_validate(body)
    except pydantic.ValidationError as error:
        raise first_fault(error, prefix) from None


def first_fault(error: pydantic.ValidationError, prefix: str = "") -> InvalidRequest:
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    # Of a union ("text or list") the branch that got furthest tells most.
    fault = max(faults, key=lambda item: len(item["loc"])) if len({item["loc"][:1] for item in faults}) == 1 else faults[0]
    field = field_name(fault["loc"], prefix)
    if len(faults) > 1 and {item["type"] for item in faults} == {"string_type", "list_type"}:
        text = f"{field} must be a text or a list of texts."
    else:
        text = MESSAGES.get(fault["type"], "{field}: {message}.").format(field=field or "The body", message=fault["msg"])
    return InvalidRequest(text, param=field or None)


def field_name(location: tuple[int | str, ...], prefix: str = "") -> str:
    """`("messages", 0, "role")` -> `messages[0].role`; names of union branches are left out."""
    name = prefix
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("str", "[key]") and not part.startswith("list["):
            name += f".{part}" if name else part
    return name[:200]
