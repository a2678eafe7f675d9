"""Which objects lose the properties that their schema does not name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headrace.text.closed_schema import close_objects

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
    assert close_objects(schema) == closed
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
    ],
)
def test_left_open(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema
