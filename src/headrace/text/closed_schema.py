"""Objects of a JSON schema without properties that it does not name: free ones are what small models never end.

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
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# what says nothing of an object's properties
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_BESIDE = _ANNOTATIONS | {"type", "$schema", "$id", "$defs", "definitions"}
_PLAIN = _BESIDE | {"properties", "required"}


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, in which objects that name their `properties` and say nothing of others have no others; as it was, if it combines schemas."""
    closed = copy.deepcopy(schema)
    nodes = list(_nodes(closed))
    if any(_combines(node) for node in nodes):
        return schema
    for node in nodes:
        named, required = node.get("properties"), node.get("required", [])
        if node.keys() <= _PLAIN and isinstance(named, dict) and isinstance(required, list) and all(name in named for name in required):
            node["additionalProperties"] = False
    return closed


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
