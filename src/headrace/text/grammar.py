"""From a form that an answer must keep (`StructuredOutputs`) to a grammar of the llguidance library, within bounds.

White space in JSON is fixed by the grammar: at most one space behind a comma or a colon, and none elsewhere. A small model left free to
write white space may write nothing else until its limit.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, LLParserLimits, grammar_from, regex_to_lark

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar_bounds import MAX_SOURCE_BYTES, check_regex, check_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # there is no such name when the program runs

# What the library may spend on one grammar and on one step of it.
LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
# Set last, so that nothing in a schema can soften them.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
MAX_MESSAGE = 300  # characters of the library's own words in an error
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")


def compile_grammar(structured: StructuredOutputs) -> str:
    """The grammar in the library's notation. Raises `InvalidRequest`, which names the field; what the library refuses comes in `check_grammar`."""
    size = len(structured.source.encode("utf-8", "replace"))
    if size > MAX_SOURCE_BYTES:
        raise refusal(structured, f"it takes {size} bytes; at most {MAX_SOURCE_BYTES} are allowed")
    try:
        match structured.kind:
            case "json_object":
                return json_grammar({"type": "object"})
            case "json_schema":
                return json_grammar(_decode(structured.source, "the schema"))
            case "regex":
                check_regex(structured.source)
                return f"start: /{regex_to_lark(structured.source, 'd')}/"
            case "choice":
                return "start: " + " | ".join(json.dumps(text) for text in _choices(structured.source))
            case "grammar":
                return cast(str, grammar_from("grammar", structured.source))
    except (ValueError, RecursionError) as error:
        raise refusal(structured, str(error)) from None


def check_grammar(structured: StructuredOutputs, grammar: str) -> None:
    """Raises `InvalidRequest` with the library's reason where it cannot hold the form."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    if failed:
        raise refusal(structured, messages[0])


def check_structured(structured: StructuredOutputs) -> None:
    """Raises `InvalidRequest` if the form cannot be kept. May take a second or two of one core, most of it outside the interpreter lock."""
    check_grammar(structured, compile_grammar(structured))


def json_grammar(schema: Any) -> str:
    """A schema as a grammar. ValueError for what is no schema and for what goes beyond the bounds."""
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("the schema false allows no answer")
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    check_schema(schema)
    return cast(str, LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS))


def json_rule(schema: dict[str, Any]) -> str:
    """A schema as a part of a Lark grammar (`%json {...}`), with the white space of all JSON answers.

    Raises ValueError for what goes beyond the bounds.
    """
    check_schema(schema)
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def refusal(structured: StructuredOutputs, reason: str) -> InvalidRequest:
    """The error for a form that cannot be kept, in words for whoever wrote it."""
    unknown = _UNKNOWN_KEYWORDS.search(reason)
    if unknown is not None:
        names = ", ".join(json.loads(f"[{unknown[1]}]"))
        reason = f"the JSON schema uses {names}, which cannot be enforced; leave it out"
    reason = reason.split("\n<", 1)[0].strip().rstrip(".")
    if len(reason) > MAX_MESSAGE:
        reason = reason[:MAX_MESSAGE] + "..."
    return InvalidRequest(f"{structured.param} cannot be used: {reason}.", param=structured.param)


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
