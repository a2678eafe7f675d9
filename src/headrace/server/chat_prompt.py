"""From messages to the ids of a prompt, through the model's chat template."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest, ModelLoadError
from headrace.server.parse import check_least_length
from headrace.server.schema import ChatOptions, Message, validate
from headrace.server.service import LoadedModel
from headrace.text.chat_template import ChatTemplate


def message_list(value: Any) -> list[dict[str, Any]]:
    """The messages as the template takes them: content is a text or null."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages is required: a list of at least one message.", param="messages")
    return [one_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def one_message(value: Any, name: str) -> dict[str, Any]:
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
    fields = message.model_dump(exclude_none=True, exclude={"content", "refusal", "audio", "function_call", "annotations"})
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
    if options.chat_template is not None:
        if not trust_request:
            raise InvalidRequest(
                "chat_template in a request is not allowed on this server; its operator can allow it with --trust-request-chat-template.",
                param="chat_template",
            )
        try:
            return ChatTemplate(options.chat_template, model.tokenizer)
        except ModelLoadError as error:
            raise InvalidRequest(str(error), param="chat_template") from None
    return model.template


def render_prompt(options: ChatOptions, model: LoadedModel, *, trust_request: bool, bounded: bool) -> tuple[tuple[int, ...], str]:
    """The ids of the prompt, and the text of the last message if it is the assistant's (an echo puts it before the answer)."""
    proceed = bool(options.continue_final_message)
    if proceed and options.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other; set one of them only.", param="continue_final_message"
        )
    if options.add_special_tokens:
        raise InvalidRequest("add_special_tokens must be false with messages: the template writes the start token.", param="add_special_tokens")
    begin = not proceed if options.add_generation_prompt is None else options.add_generation_prompt
    template = choose_template(options, model, trust_request=trust_request)
    messages = message_list(options.messages)
    if bounded:
        check_least_length(sum(len(message["content"] or "") for message in messages), model, "messages")
    ids = template.render_ids(messages, add_generation_prompt=begin, continue_final_message=proceed, kwargs=options.chat_template_kwargs)
    last = messages[-1]
    return tuple(ids), (last["content"] or "") if last["role"] == "assistant" else ""
