"""Forms of answers as grammars: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar import check_structured, json_rule


def schema(value: Any) -> StructuredOutputs:
    return StructuredOutputs(kind="json_schema", source=json.dumps(value), param="response_format")


def refused(structured: StructuredOutputs) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_structured(structured)
    assert caught.value.param == structured.param
    assert len(caught.value.message) < 500
    return caught.value.message


GOOD = [
    StructuredOutputs(kind="json_object"),
    StructuredOutputs(kind="json_schema", source="true"),
    schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"enum": [1, "x", None]}}}),
    StructuredOutputs(kind="regex", source=r"^[0-9]{3}-\d+/[^]{9}]$"),
    StructuredOutputs(kind="choice", source='["red", "", "a\\"b\\\\\\u0000\\n"]'),
    StructuredOutputs(kind="grammar", source='start: "a" b\nb: %json {"type": "object"}'),
    StructuredOutputs(kind="grammar", source='root ::= word " and " word\nword ::= "salt" | "pepper"'),
]


@pytest.mark.parametrize("structured", GOOD)
def test_good(structured: StructuredOutputs) -> None:
    check_structured(structured)


@pytest.mark.parametrize("keyword", ["not", "uniqueItems", "contains", "if", "dependentRequired", "propertyNames", "unevaluatedProperties"])
def test_keywords_that_cannot_be_enforced_are_named(keyword: str) -> None:
    value: Any = True if keyword in ("uniqueItems",) else {"type": "string"}
    assert f"uses {keyword}," in refused(schema({"type": "object", "properties": {"a": {keyword: value}}}))


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (schema({"type": "notatype"}), "notatype"),
        (schema({"$ref": "#/$defs/missing"}), "missing"),
        (schema({"type": "string", "pattern": "^hello\\!($"}), "unclosed group"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"type": "string", "format": "foo"}), "format"),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
        (schema(7), "must be a JSON object"),
        (schema("text"), "must be a JSON object"),
        (schema(False), "allows no answer"),
        (schema({"multipleOf": 1000003}), "multipleOf"),
        (schema({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}), "multipleOf"),
        (schema({"properties": {f"p{i}": {} for i in range(500)}}), "properties"),
        (StructuredOutputs(kind="json_schema", source="{not"), "not valid JSON"),
        (StructuredOutputs(kind="json_schema", source=""), "not valid JSON"),
        (StructuredOutputs(kind="regex", source="[.*"), "unclosed character class"),
        (StructuredOutputs(kind="choice", source="[]"), "list of texts"),
        (StructuredOutputs(kind="choice", source="[1]"), "list of texts"),
        (StructuredOutputs(kind="choice", source='"red"'), "list of texts"),
        (StructuredOutputs(kind="grammar", source="root ::= ["), "GBNF"),
        (StructuredOutputs(kind="grammar", source='start: "a" b'), "unknown name"),
    ],
)
def test_bad(structured: StructuredOutputs, words: str) -> None:
    assert words in refused(structured)


@pytest.mark.parametrize(
    "structured",
    [
        schema({"description": "x" * 10_000_000}),
        StructuredOutputs(kind="json_schema", source='{"items":' * 10_000 + "{}" + "}" * 10_000),
        StructuredOutputs(kind="json_schema", source='{"items":' * 100 + "{}" + "}" * 100),
        StructuredOutputs(kind="regex", source="a{1000}{1000}"),
        StructuredOutputs(kind="regex", source="(((a{1,100}){1,100}){1,100}){1,100}"),
        schema({"pattern": "([ab]{300}){300}{300}"}),
        schema({"allOf": [{"anyOf": [{"properties": {f"a{i}": {}}}, {"properties": {f"b{i}": {}}}]} for i in range(30)]}),
        StructuredOutputs(kind="grammar", source="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ],
)
def test_what_explodes_is_refused_quickly(structured: StructuredOutputs) -> None:
    begin = time.thread_time()
    refused(structured)
    assert time.thread_time() - begin < 2.0


def test_a_schema_as_a_part_of_a_grammar() -> None:
    rule = json_rule({"type": "object", "required": ["a"]})
    check_structured(StructuredOutputs(kind="grammar", source=f'start: "<call>" body "</call>"\nbody: {rule}'))
    with pytest.raises(ValueError, match="multipleOf"):
        json_rule({"multipleOf": 1000003})
