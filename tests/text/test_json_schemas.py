"""Two hundred schemas: whatever is drawn under a schema's grammar validates, or the schema is refused and the refusal names a keyword of it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar_compiler import compile_matcher
from headrace.text.grammar_vocabulary import GrammarVocabulary

WORDS = [b'{"', b'":', b'", "', b'"}', b"true", b"null", b"12", b"-0.", b"e", b"\\u00", b" ", b', "', b"[]", b"{}", "é".encode(), "🫠".encode()[:2]]
TOKENS = (*(bytes([byte]) for byte in range(256)), *WORDS, b"</s>")
END = len(TOKENS) - 1
CLOSERS = [TOKENS.index(token) for token in (b"</s>", b'"', b"b", b"}", b"]", b"null", b",", b"0", b"1")]
MAX_TOKENS = 600

LEAVES: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[a-c]{2,4}x?$"},
    {"type": "string", "pattern": "b+"},
    {"type": "string", "pattern": "^(\\d{3}-)+\\w$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "duration"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "enum": ["a", 'quote"d', "back\\slash", "ünïcode", "line\nbreak", ""]},
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1003},
    {"type": "integer", "multipleOf": 7, "minimum": 0},
    {"type": "number"},
    {"type": "number", "minimum": 0.25, "maximum": 0.75},
    {"type": "number", "exclusiveMinimum": -1, "maximum": 1},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 1000},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["integer", "boolean"]},
    {"const": {"deep": [1, None, "x"]}},
    {"const": 3.5},
    {"enum": [1, "one", None, True, [1], {"k": 1}]},
    {"enum": ["red", "green"], "type": "string"},
    {"enum": [1, "x", None], "type": ["string", "null"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 2}, {"type": "integer"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 4},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x_": {"type": "null"}}, "additionalProperties": False, "minProperties": 1},
    {"type": "object", "properties": {"a": True, "b": {"type": "null"}}, "required": ["b"], "additionalProperties": False},
    {"type": "object", "required": ["only"], "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
]
REFUSED: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
    {"type": "array", "items": {"const": 1}, "minContains": 2},
    {"type": "array", "unevaluatedItems": False},
    {"$dynamicRef": "#node", "$defs": {"node": {"$dynamicAnchor": "node"}}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"if": {"type": "string"}, "else": {"type": "null"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "string", "format": "telephone"},
    {"type": "string", "pattern": "^(?!x)"},
    {"type": "integer", "minimum": 5, "maximum": 2},
    {"$ref": "#/$defs/nothing"},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    {"type": "integer", "multipleOf": 999983},
]


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def wrapped(leaf: dict[str, Any], other: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The ways in which schemas are put together."""
    yield closed(first=leaf, second=other)
    yield {"type": "object", "properties": {"maybe": leaf, "also": other}, "additionalProperties": False}
    yield {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2}
    yield {"anyOf": [leaf, closed(inner=other)]}
    yield {"oneOf": [closed(kind={"const": "left"}, value=leaf), closed(kind={"const": "right"}, value=other)]}
    yield {"allOf": [{"properties": {"a": leaf}, "required": ["a"]}, {"properties": {"b": other}, "required": ["b"]}], "type": "object"}
    yield {"$ref": "#/definitions/old", "definitions": {"old": closed(a={"$ref": "#named"}, b={"$anchor": "named", **leaf})}}
    yield {"$ref": "#/$defs/pair", "$defs": {"leaf": leaf, "pair": closed(a={"$ref": "#/$defs/leaf"}, b={"$ref": "#/$defs/leaf"})}}
    yield closed(list={"type": "array", "prefixItems": [leaf, other], "minItems": 2, "maxItems": 2, "items": False}, tag={"const": "x"})
    yield {"type": "object", "properties": {"t": leaf}, "required": ["t", "more"], "additionalProperties": other, "maxProperties": 2}
    yield {
        "$defs": {"node": {**closed(value=leaf), "properties": {"value": leaf, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
        "$ref": "#/$defs/node",
    }


def schemas() -> list[dict[str, Any]]:
    draw = random.Random(7)
    combined = [schema for leaf in LEAVES for schema in draw.sample(list(wrapped(leaf, draw.choice(LEAVES))), 5)]
    nested = [closed(outer=schema, n={"type": "integer", "minimum": 0}) for schema in draw.sample(combined, 10)]
    return [*LEAVES, *REFUSED, *combined, *nested]


def drawn(structured: StructuredOutputs, tokenizer: LLTokenizer, draw: random.Random) -> str:
    """A text under the form's grammar: at random at first, then with a taste for what closes."""
    matcher = compile_matcher(structured, tokenizer)
    tokens: list[int] = []
    for count in itertools.count():
        assert count < MAX_TOKENS, f"{b''.join(TOKENS[token] for token in tokens)!r} comes to no end"
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        assert not matcher.is_error(), matcher.get_error()
        closing = [token for token in CLOSERS if token in allowed]
        token = closing[0] if closing and draw.random() < min(0.7, count / 40) else int(draw.choice(allowed))
        if token == END:
            break
        tokens.append(token)
        assert matcher.consume_token(token)
        if matcher.is_stopped():
            assert not matcher.is_error()
            break
    return b"".join(TOKENS[token] for token in tokens).decode()


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        return {str(key) for key in schema} | set().union(*map(keywords, schema.values()))
    return set().union(*map(keywords, schema)) if isinstance(schema, list) else {str(schema)}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return GrammarVocabulary(tokens=TOKENS, control_token_ids=(END,), end_token_ids=(END,)).library_tokenizer()


def test_what_is_drawn_validates_or_the_keyword_is_named(tokenizer: LLTokenizer) -> None:
    draw = random.Random(1)
    checker = jsonschema.FormatChecker(formats=["ipv4", "ipv6", "uuid"])  # of dates only the shape is kept
    refused = []
    for schema in schemas():
        jsonschema.Draft202012Validator.check_schema(schema)
        structured = StructuredOutputs(kind="json_schema", source=json.dumps(schema))
        try:
            compile_matcher(structured, tokenizer)
        except InvalidRequest as error:
            refused.append((schema, error.message))
            continue
        for text in {drawn(structured, tokenizer, draw) for _ in range(3)}:
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    assert len(schemas()) >= 200
    assert [schema for schema in REFUSED if schema not in [other for other, _ in refused]] == []
    assert [(schema, message) for schema, message in refused if not any(word in message for word in keywords(schema))] == []
    assert len(refused) <= len(REFUSED) + 5, refused
