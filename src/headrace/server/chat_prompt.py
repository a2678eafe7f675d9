"""The messages of a body, and the template they go through."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest, ModelLoadError
from headrace.server.schema import ChatOptions, Message, validate
from headrace.server.service import LoadedModel
from headrace.text.chat_template import ChatTemplate


def message_list(value: Any) -> list[Message]:
    """The messages of a body, checked."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages is required: a list of at least one message.", param="messages")
    return [one_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def one_message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object with a role and a content.", param=name)
    content = value.get("content")
    if isinstance(content, list):
        check_parts(content, f"{name}.content")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{name}.content must be a text, a list of text parts, or null.", param=f"{name}.content")
    message = validate(Message, value, prefix=name)
    if "content" not in value and not message.tool_calls:
        raise InvalidRequest(f"{name}.content is required.", param=f"{name}.content")
    return message


# Parts of an answer that come back with it and that no template is given.
NOT_FOR_TEMPLATES: dict[str, Any] = dict.fromkeys(("content", "refusal", "audio", "function_call", "annotations", "parsed"), True)
NOT_FOR_TEMPLATES["tool_calls"] = {"__all__": {"function": {"parsed_arguments"}}}


def template_message(message: Message) -> dict[str, Any]:
    """The message as templates take it: content is a text or null."""
    fields = message.model_dump(exclude_none=True, exclude=NOT_FOR_TEMPLATES)
    text = message.content
    fields["content"] = text if text is None or isinstance(text, str) else "".join(part.text for part in text)
    return fields


def check_parts(parts: list[Any], name: str) -> None:
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            raise InvalidRequest(f"{name}[{index}] must be an object.", param=f"{name}[{index}]")
        kind = part.get("type")
        if isinstance(kind, str) and kind != "text":
            shown = kind[:40]
            raise InvalidRequest(
                f"{name}[{index}] is of type {shown!r}, which this model cannot read: it is no multimodal model. Send text parts only.",
                param=f"{name}[{index}].type",
                code="unsupported_value",
            )


def choose_template(options: ChatOptions, model: LoadedModel, *, trust_request: bool) -> ChatTemplate:
    """The model's template, or the request's own where the operator trusts those."""
    if options.chat_template is None:
        return model.template
    if not trust_request:
        raise InvalidRequest(
            "chat_template in a request is not allowed on this server; its operator can allow it with --trust-request-chat-template.",
            param="chat_template",
        )
    try:
        return ChatTemplate(options.chat_template, model.tokenizer)
    except ModelLoadError as error:
        raise InvalidRequest(str(error), param="chat_template") from None
