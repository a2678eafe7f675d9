"""Fields that clients know from other APIs and that are refused here, each with the reason and the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.errors import InvalidRequest

NO_AUDIO = "Audio is not supported; this server answers with text."
OLD_TOOLS = "{field} is the older form of tool calls, which is not supported; send tools and tool_choice instead."
NO_LEGACY = "{field} is not supported; describe the change in the prompt instead."

Rule = tuple[Callable[[Any, dict[str, Any]], bool], str]  # (whether the value asks for nothing, reason)


def never(value: Any, body: dict[str, Any]) -> bool:
    """No value of the field but null asks for nothing."""
    return False


def _same_as_n(value: Any, body: dict[str, Any]) -> bool:
    return type(value) is int and value == (1 if body.get("n") is None else body["n"])


def _text_only(value: Any, body: dict[str, Any]) -> bool:
    return bool(value == ["text"])


def _none(value: Any, body: dict[str, Any]) -> bool:
    return bool(value == "none")


def _medium(value: Any, body: dict[str, Any]) -> bool:
    return bool(value == "medium")


def _not_stored(value: Any, body: dict[str, Any]) -> bool:
    return value is False


# of completions and chats
UNSUPPORTED: dict[str, Rule] = {
    "suffix": (never, NO_LEGACY),
    "best_of": (_same_as_n, "best_of is not supported; ask for n choices and choose among them."),
    "audio": (never, NO_AUDIO),
    "modalities": (_text_only, 'modalities may only be ["text"]: ' + NO_AUDIO),
    "web_search_options": (never, "web_search_options is not supported; this server does not search the web."),
    "functions": (never, OLD_TOOLS),
    "function_call": (_none, OLD_TOOLS),
    "verbosity": (_medium, "verbosity may only be medium; ask for the length in the prompt."),
    "moderation": (never, "moderation is not supported; leave it out."),
    "store": (_not_stored, "store must be false: this server keeps no answers."),
    "use_beam_search": (_not_stored, "use_beam_search is not supported; use temperature 0 for the likeliest text."),
    "logits_processors": (never, "logits_processors is not supported; use logit_bias or allowed_token_ids."),
    "documents": (never, "documents is not supported; put them into the messages."),
}


def refuse_unsupported(body: dict[str, Any], rules: dict[str, Rule]) -> None:
    """Raise `InvalidRequest` for the first field that asks for what is not there, and take out those that ask for nothing."""
    for field, (harmless, reason) in rules.items():
        if field not in body:
            continue
        value = body[field]
        if value is not None and not harmless(value, body):
            raise InvalidRequest(reason.format(field=field), param=field, code="unsupported_value")
        del body[field]
