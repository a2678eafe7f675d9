"""Which objects lose the properties that their schema does not name, which integers get bounds, and which references are mended."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headrace.text.held_schema import held_schema

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CLOSED = {**NAMED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (NAMED, CLOSED),
        ({"properties": {}, "title": "t"}, {"properties": {}, "title": "t", "additionalProperties": False}),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [NAMED, True], "items": False}, {"prefixItems": [CLOSED, True], "items": False}),
        ({"additionalProperties": NAMED}, {"additionalProperties": CLOSED}),
        ({"anyOf": [NAMED, {"type": "null"}], "description": "d"}, {"anyOf": [CLOSED, {"type": "null"}], "description": "d"}),
        ({"allOf": [NAMED], "default": {"properties": {}}}, {"allOf": [CLOSED], "default": {"properties": {}}}),
        ({"$ref": "#/$defs/n", "$defs": {"n": NAMED}}, {"$ref": "#/$defs/n", "$defs": {"n": CLOSED}}),
        ({"properties": {"properties": NAMED}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
    ],
)
def test_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    assert held_schema(schema) == closed
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},  # free on purpose
        {**NAMED, "additionalProperties": True},
        {**NAMED, "required": ["a", "b"]},
        {**NAMED, "minProperties": 2},
        {"const": NAMED, "enum": [NAMED]},
        {"allOf": [NAMED, {"properties": {"b": {}}}]},
        {**NAMED, "anyOf": [{"properties": {"b": {}}}, {}]},
        {**NAMED, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}}}},
        {"properties": {"x": NAMED}, "patternProperties": {"x": {"properties": {"b": {}}}}},
        {"properties": 7, "anyOf": 7, "items": 7},
        {"properties": {}, "required": 7},
        {"properties": {}, "required": [[]]},
    ],
)
def test_left_open(schema: dict[str, Any]) -> None:
    assert held_schema(schema) == schema


SAFE = 2**53 - 1


@pytest.mark.parametrize(
    ("schema", "added"),
    [
        ({}, {"minimum": -SAFE, "maximum": SAFE}),
        ({"title": "t", "minimum": 0}, {"maximum": SAFE}),
        ({"exclusiveMinimum": 3}, {"maximum": SAFE}),
        ({"maximum": 10**20}, {"minimum": -SAFE}),
        ({"exclusiveMaximum": 5.5}, {"minimum": -SAFE}),
        ({"minimum": 1, "maximum": 10**20}, {}),
        ({"minimum": SAFE}, {}),  # nothing but what is larger
        ({"maximum": -(10**20)}, {}),
        ({"const": 10**20}, {}),
        ({"enum": [10**20]}, {}),
        ({"multipleOf": 10**20}, {}),
        ({"minimum": "x"}, {}),
        ({"minimum": True}, {}),
    ],
)
def test_integers_have_bounds(schema: dict[str, Any], added: dict[str, Any]) -> None:
    schema = {"type": "integer", **schema}
    assert held_schema({"type": "array", "items": schema}) == {"type": "array", "items": {**schema, **added}}


@pytest.mark.parametrize(
    ("written", "held"),
    [("/$defs/a", "#/$defs/a"), ("/definitions/a", "#/definitions/a"), ("#/$defs/a", "#/$defs/a"), ("/other", "/other"), (7, 7)],
)
def test_references(written: Any, held: Any) -> None:
    schema = {"items": {"$ref": written}, "const": {"$ref": written}}
    assert held_schema(schema) == {"items": {"$ref": held}, "const": {"$ref": written}}
