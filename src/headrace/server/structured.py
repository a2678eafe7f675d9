"""The fields of a body that ask for a form of the answer: OpenAI's response_format, vLLM's structured_outputs and its older guided_* names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import BaseModel

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs


class StructuredFields(BaseModel):
    """For bodies of routes that know these fields; their values are checked by `structured_outputs`."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


def structured_outputs(body: StructuredFields) -> StructuredOutputs | None:
    """The form that the answer must keep. Raises `InvalidRequest`, which names the field; whether it can be kept is found out later."""
    found = [read(getattr(body, name), name) for name, read in _READERS.items() if getattr(body, name) is not None]
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        raise InvalidRequest(
            f"{forms[1].param} is a second form for the same answer, beside {forms[0].param}; send one of them.", param=forms[1].param
        )
    return forms[0] if forms else None


def response_format(value: Any, field: str) -> StructuredOutputs | None:
    """`{"type": "text" | "json_object" | "json_schema", ...}`; None for text."""
    kind = _object(value, field).get("type")
    match kind:
        case "text":
            _only(value, field, {"type"})
            return None
        case "json_object":
            _only(value, field, {"type", "schema"})
            if value.get("schema") is not None:  # as llama.cpp's server has it
                return _schema(value["schema"], f"{field}.schema")
            return StructuredOutputs(kind="json_object", param=field)
        case "json_schema":
            _only(value, field, {"type", "json_schema"})
            return json_schema_format(value.get("json_schema"), f"{field}.json_schema")
    raise InvalidRequest(f"{field}.type must be text, json_object or json_schema.", param=field)


def json_schema_format(value: Any, field: str) -> StructuredOutputs:
    """`{"name", "schema", "strict", "description"}`. The schema is kept whether or not `strict` says so."""
    _only(_object(value, field), field, {"name", "schema", "strict", "description"})
    for name, kind, words in (("name", str, "a text"), ("description", str, "a text"), ("strict", bool, "true or false")):
        if value.get(name) is not None and not isinstance(value[name], kind):
            raise InvalidRequest(f"{field}.{name} must be {words}.", param=f"{field}.{name}")
    if value.get("schema") is None:
        raise InvalidRequest(f"{field}.schema is required.", param=f"{field}.schema")
    return _schema(value["schema"], f"{field}.schema")


def _structured_outputs(value: Any, field: str) -> StructuredOutputs:
    """vLLM's object, with exactly one of its keys."""
    given = {name: entry for name, entry in _object(value, field).items() if entry is not None and not (name == "json_object" and entry is False)}
    _only(given, field, {"json", "regex", "choice", "grammar", "json_object"})
    if len(given) != 1:
        raise InvalidRequest(f"{field} must have exactly one of json, regex, choice, grammar and json_object.", param=field)
    ((name, entry),) = given.items()
    path = f"{field}.{name}"
    match name:
        case "json":
            return _schema_or_text(entry, path)
        case "json_object":
            if entry is not True:
                raise InvalidRequest(f"{path} must be true or false.", param=path)
            return StructuredOutputs(kind="json_object", param=path)
        case "choice":
            return _choice(entry, path)
    return _text("regex" if name == "regex" else "grammar", entry, path)


def _schema_or_text(value: Any, field: str) -> StructuredOutputs:
    """A schema, or one written as JSON text."""
    return StructuredOutputs(kind="json_schema", source=value, param=field) if isinstance(value, str) else _schema(value, field)


def _schema(value: Any, field: str) -> StructuredOutputs:
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{field} must be a JSON schema: an object.", param=field)
    return StructuredOutputs(kind="json_schema", source=msgspec.json.encode(value).decode(), param=field)


def _choice(value: Any, field: str) -> StructuredOutputs:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(f"{field} must be a list of texts, not empty.", param=field)
    return StructuredOutputs(kind="choice", source=msgspec.json.encode(value).decode(), param=field)


def _text(kind: Any, value: Any, field: str) -> StructuredOutputs:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a text.", param=field)
    return StructuredOutputs(kind=kind, source=value, param=field)


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be an object.", param=field)
    return value


def _only(value: dict[str, Any], field: str, known: set[str]) -> None:
    unknown = [name for name, entry in value.items() if name not in known and entry is not None]
    if unknown:
        name = f"{field}.{unknown[0]}"[:200]
        raise InvalidRequest(f"Unknown field {name!r}; leave it out. Known are {', '.join(sorted(known))}.", param=name)


_READERS: dict[str, Callable[[Any, str], StructuredOutputs | None]] = {
    "response_format": response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema_or_text,
    "guided_regex": lambda value, field: _text("regex", value, field),
    "guided_choice": _choice,
    "guided_grammar": lambda value, field: _text("grammar", value, field),
}
