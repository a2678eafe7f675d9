"""From a form that an answer must keep (`StructuredOutputs`) to a grammar of the llguidance library, within bounds.

White space in JSON is fixed by the grammar: at most one space behind a comma or a colon, and none elsewhere. A small model left free to
write white space may write nothing else until its limit.
"""

from __future__ import annotations

import json
import re
from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar_bounds import MAX_SOURCE_BYTES, check_regex, check_schema
from headrace.text.held_schema import held_schema

# The model spells forced text as it likes: the library would choose the tokens, and has only our word for how texts become tokens.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "coerce_one_of": False, "lenient": False}
MAX_GBNF_CHARACTERS = 32 * 1024  # converting is slow, and keeps other threads waiting
MAX_MESSAGE = 300  # characters of the library's own words in an error
CANNOT = " cannot be used: "  # between the field and the reason
_POSITION = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_LISTING = re.compile(r"\n +\d+ \| ")
_BAD_POINTER = re.compile(r"(Pointer|Resource) '(.{1,200}?)' (does not exist|is not present)")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")


def grammar_of(structured: StructuredOutputs) -> str:
    """The grammar in the library's notation, a variant of Lark. Raises `InvalidRequest`, which names the field.

    What only the library can find wrong is found when the grammar is compiled.
    """
    check_size(structured)
    try:
        return _lark(structured) + OPTIONS
    except (ValueError, RecursionError) as error:
        raise refusal(structured, str(error)) from None


def check_size(structured: StructuredOutputs) -> None:
    """Raises `InvalidRequest` for a source that is too long."""
    size = len(structured.source.encode("utf-8", "replace"))
    if size > MAX_SOURCE_BYTES:
        raise refusal(structured, f"it takes {size} bytes; at most {MAX_SOURCE_BYTES} are allowed")


def _lark(structured: StructuredOutputs) -> str:
    if structured.kind == "grammar":
        return _lark_of(structured.source)
    if structured.kind == "choice":  # as one lexeme: there may be thousands
        return "start: CHOICE\nCHOICE: " + form_rule(structured)
    return "start: " + form_rule(structured)


def form_rule(structured: StructuredOutputs) -> str:
    """What holds the form, as the body of a rule in a larger Lark grammar. Raises ValueError or RecursionError for what makes no sense."""
    source = structured.source
    match structured.kind:
        case "json_object":
            return json_rule({"type": "object"})
        case "json_schema":
            return json_rule(_decode(source, "the schema"))
        case "regex":
            check_regex(source)
            return f"/{lark_regex(source, ascii_classes='d')}/"
        case "choice":
            return " | ".join(json.dumps(text) for text in _choices(source))
        case "grammar":
            return f"%lark {{\n{_lark_of(source)}\n}}"


def lark_regex(regex: str, *, ascii_classes: str = "") -> str:
    """A regular expression as Lark writes it between slashes; of `ascii_classes`, such as "d", only ASCII characters count."""
    from llguidance import regex_to_lark  # here and below: a process that is never asked for a form does not hold the library

    return regex_to_lark(regex, ascii_classes)


def _lark_of(source: str) -> str:
    from llguidance.gbnf_to_lark import is_lark_syntax

    check_regex(source)
    return source if is_lark_syntax(source) else _from_gbnf(source)


def _from_gbnf(source: str) -> str:
    if len(source) > MAX_GBNF_CHARACTERS:
        raise ValueError(f"a grammar in GBNF may have at most {MAX_GBNF_CHARACTERS} characters; write it in Lark")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(source)
    except Exception as error:  # the converter raises nothing narrower
        raise ValueError(f"it is no Lark grammar (there is no rule start), and as GBNF it is wrong: {error}") from None


def json_rule(schema: Any) -> str:
    """A schema as a part of a Lark grammar (`%json {...}`), with the white space of all JSON answers, and without free properties.

    Raises ValueError for what is no schema and for what goes beyond the bounds.
    """
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("the schema false allows no answer")
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    check_schema(schema)
    return "%json " + json.dumps({**held_schema(schema), "x-guidance": JSON_OPTIONS})


def refusal(structured: StructuredOutputs, reason: str) -> InvalidRequest:
    """The error for a form that cannot be kept, in words for whoever wrote it."""
    unknown = _UNKNOWN_KEYWORDS.search(reason)
    param = _field(structured, reason)
    if "oneOf constraints" in reason:
        reason = "oneOf can only be enforced where its schemas exclude each other by type or by a constant property; use anyOf"
    if (pointer := _BAD_POINTER.search(reason)) is not None:
        reason = f"$ref points to {pointer[2]!r}, which is not in the schema"
    if unknown is not None:
        names = ", ".join(json.loads(f"[{unknown[1]}]"))
        reason = f"the JSON schema uses {names}, which cannot be enforced; leave it out"
    if structured.kind != "grammar" or structured.rule_params:  # the library speaks of a grammar that is ours, not the user's
        reason = _LISTING.split(_POSITION.sub("", reason), maxsplit=1)[0]
    reason = reason.removeprefix("failed to compile JSON schema: ").split("\n<", 1)[0].strip().rstrip(".")
    if len(reason) > MAX_MESSAGE:
        reason = reason[:MAX_MESSAGE] + "..."
    return InvalidRequest(f"{param}{CANNOT}{reason}.", param=param)


def _field(structured: StructuredOutputs, reason: str) -> str:
    """The field that the line at fault comes from."""
    found = _POSITION.match(reason)
    if found is None:
        return structured.param
    line = structured.source.splitlines()[int(found[1]) - 1 : int(found[1])]
    rule = "".join(line).partition(":")[0].partition("[")[0]
    return dict(structured.rule_params).get(rule, structured.param)


def _decode(source: str, what: str) -> Any:
    try:
        return json.loads(source)
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None


def _choices(source: str) -> list[str]:
    choices = _decode(source, "the list of choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise ValueError("the choices must be a list of texts, not empty")
    return choices
