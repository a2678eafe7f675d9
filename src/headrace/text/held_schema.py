"""What a grammar holds of a JSON schema: no properties that are not named and no integers of any length, since these are what small models never end.

A grammar may hold less than a schema allows, as long as something is left. Where one object is described by several schemas at once (`allOf`, or
`anyOf` beside `properties`), each of them names only a part of the properties, and closing one would shut out the others'.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_LOCAL = ("/$defs/", "/definitions/")  # LiteLLM writes references so for Anthropic's API; by the letter they would be addresses of other documents
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# what says nothing of an object's properties
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_BESIDE = _ANNOTATIONS | {"type", "$schema", "$id", "$defs", "definitions"}
_PLAIN = _BESIDE | {"properties", "required"}
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_INTEGER = _BESIDE | _BOUNDS
_LARGEST = 2**53 - 1  # integers up to here mean the same everywhere (RFC 8259, section 6)


def held_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, in which objects that name their `properties` and say nothing of others have no others, unless it combines schemas, and
    integers without a bound keep to those that every reader of JSON takes.
    """
    held = copy.deepcopy(schema)
    nodes = list(_nodes(held))
    for node in nodes:
        if isinstance(node.get("$ref"), str) and node["$ref"].startswith(_LOCAL):
            node["$ref"] = "#" + node["$ref"]
        _bound(node)
    if not any(_combines(node) for node in nodes):
        for node in nodes:
            _close(node)
    return held


def _close(node: dict[str, Any]) -> None:
    named, required = node.get("properties"), node.get("required", [])
    if not (node.keys() <= _PLAIN and isinstance(named, dict) and isinstance(required, list)):
        return
    if all(isinstance(name, str) and name in named for name in required):
        node["additionalProperties"] = False


def _bound(node: dict[str, Any]) -> None:
    if node.get("type") != "integer" or not node.keys() <= _INTEGER or not all(type(node[key]) in (int, float) for key in node.keys() & _BOUNDS):
        return
    lowest, highest = node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum", node.get("exclusiveMaximum"))
    if highest is None and (lowest is None or lowest < _LARGEST):
        node["maximum"] = _LARGEST
    if lowest is None and (highest is None or highest > -_LARGEST):
        node["minimum"] = -_LARGEST


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and those in it."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                pending.extend(node[key].values())
        for key in _LISTS:
            if isinstance(node.get(key), list):
                pending.extend(node[key])
        pending.extend(node[key] for key in _SINGLE if key in node)


def _combines(node: dict[str, Any]) -> bool:
    """Whether the node describes one value by several schemas."""
    combining = node.keys() & _COMBINING
    if not combining:
        return "properties" in node and "patternProperties" in node
    several = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
    return several or len(combining) > 1 or not node.keys() - combining <= _BESIDE
