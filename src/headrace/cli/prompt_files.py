"""The input of `headrace generate`: one request a line, as text or as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, InvalidRequest
from headrace.sampling_params import SamplingParams

KEYS = {"id", "prompt", "messages", "params"}
PARAMS = {field.name for field in dataclasses.fields(SamplingParams)} - {"choice_index", "bad_words_ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of input, not yet understood."""

    text: str
    is_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """What a line asks for: `prompt` or `messages`."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams


def read_lines(files: Sequence[str], form: str) -> list[Line]:
    """The lines of all files in order, blank ones left out; `-` is stdin. `form`: text, jsonl, or auto (by the name's end)."""
    lines: list[Line] = []
    for name in files:
        try:
            content = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read {name}: {error}") from error
        is_json = form == "jsonl" or (form == "auto" and name.endswith((".jsonl", ".ndjson")))
        lines.extend(Line(text=text, is_json=is_json) for text in content.split("\n") if text.strip())
    return lines


def parse_line(line: Line, defaults: dict[str, Any], *, chat: bool) -> LineRequest:
    """Raises `InvalidRequest` that names the key at fault. `chat` makes a prompt a user message."""
    body = _object(line.text) if line.is_json else {"prompt": line.text.rstrip("\r")}
    if unknown := sorted(set(body) - KEYS):
        raise InvalidRequest(f"Unknown key {unknown[0]}; a line may hold {', '.join(sorted(KEYS))}.", param=unknown[0])
    params = sampling_params({**defaults, **_params(body.get("params"))})
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequest("A line must hold prompt or messages, and not both.", param="prompt")
    if messages is not None:
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest("messages must be a list of objects with role and content.", param="messages")
        return LineRequest(prompt=None, messages=messages, params=params)
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt must be a text.", param="prompt")
    if chat:
        return LineRequest(prompt=None, messages=[{"role": "user", "content": prompt}], params=params)
    return LineRequest(prompt=prompt, messages=None, params=params)


def line_id(line: Line) -> object:
    """The id that a JSON line gives itself, for its line of output; None where it has none or cannot be read."""
    if not line.is_json:
        return None
    try:
        return _object(line.text).get("id")
    except InvalidRequest:
        return None


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """Raises `InvalidRequest` that names the field."""
    if unknown := sorted(set(fields) - PARAMS):
        raise InvalidRequest(f"Unknown field {unknown[0]} in params; known are {', '.join(sorted(PARAMS))}.", param=unknown[0])
    if isinstance(bias := fields.get("logit_bias"), dict):
        if wrong := [token for token in bias if not token.isdecimal()]:
            raise InvalidRequest(f"logit_bias must have token ids as keys, not {wrong[0]!r}.", param="logit_bias")
        fields = {**fields, "logit_bias": {int(token): value for token, value in bias.items()}}  # keys of JSON objects are texts
    try:
        return SamplingParams(**fields)
    except TypeError as error:
        raise InvalidRequest(f"params hold a value of the wrong type: {error}.", param="params") from error


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The line is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"The line must be a JSON object, not a {type(value).__name__}.")
    return value


def _params(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("params must be an object.", param="params")
    return value
