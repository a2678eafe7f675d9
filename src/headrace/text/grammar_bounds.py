"""Bounds on schemas and regular expressions, checked before the grammar library sees them.

The library has limits of its own, but some small sources make it work for many seconds in one call that nothing can interrupt. Each bound
here stands before one of those. All functions raise ValueError with a reason that can follow "cannot be used:".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

STACK_BYTES = 16 * 1024 * 1024  # of threads that compile: the library follows references between rules by recursion
MAX_SOURCE_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64  # objects and lists of the schema's text, one inside the other
MAX_OPTIONAL_PROPERTIES = 400  # of one object; the work grows with their square
MAX_MULTIPLE = 2000  # least common multiple of all multipleOf, without their powers of ten: so many states has the automaton
MAX_REPEATED = 100_000  # characters and classes that a regular expression has with its bounded repetitions written out
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")


def check_schema(schema: dict[str, Any]) -> None:
    """Walks all of the schema, also where keywords do not apply."""
    multiple = 1
    for node in _objects(schema):
        properties, required = node.get("properties"), node.get("required")
        if isinstance(properties, dict):
            kept = len(properties.keys() & {name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
            if len(properties) - kept > MAX_OPTIONAL_PROPERTIES:
                raise ValueError(f"properties: an object has more than {MAX_OPTIONAL_PROPERTIES} that are not required")
        step = node.get("multipleOf")
        if isinstance(step, int | float) and not isinstance(step, bool) and step > 0 and math.isfinite(step):
            multiple = math.lcm(multiple, _coefficient(step))
            if multiple > MAX_MULTIPLE:
                raise ValueError(f"multipleOf: {step} makes more than {MAX_MULTIPLE} remainders to tell apart")
        if isinstance(node.get("pattern"), str):
            check_regex(node["pattern"])
        if isinstance(node.get("patternProperties"), dict):
            for pattern in node["patternProperties"]:
                check_regex(pattern)
    if "x-guidance" in schema:
        raise ValueError("the JSON schema uses x-guidance, which cannot be set; leave it out")


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object in the schema. Without recursion: the depth is what is checked."""
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        if isinstance(value, dict):
            yield value
        children = value.values() if isinstance(value, dict) else value
        pending.extend((child, depth + 1) for child in children if isinstance(child, dict | list))


def _coefficient(step: int | float) -> int:
    """The number's digits without its power of ten: 0.25 -> 25, 300 -> 3."""
    digits = "".join(map(str, Decimal(str(step)).as_tuple().digits)).strip("0")
    return int(digits or 1)


def check_regex(pattern: str) -> None:
    """Bounds how large a pattern becomes when `{m,n}` is written out, groups inside of groups included."""
    weights = [0]  # of the groups that are open, outermost first
    last = 0  # of what a repetition would apply to
    place = 0
    while place < len(pattern):
        char = pattern[place]
        count = _COUNT.match(pattern, place) if char == "{" else None
        if count is not None and (count[1] or count[3]):
            times = max(int(number) for number in (count[1], count[3]) if number)
            weights[-1] += last * max(times - 1, 0)
            last *= max(times, 1)
            if weights[-1] > MAX_REPEATED:
                raise ValueError(f"the regular expression has more than {MAX_REPEATED} characters when its repetitions are written out")
            place = count.end()
            continue
        if char == "(":
            weights.append(0)
        elif char == ")" and len(weights) > 1:
            last = weights.pop()
            weights[-1] += last
        elif char not in "*+?|":
            place = _end_of_atom(pattern, place)
            last = 1
            weights[-1] += 1
            continue
        place += 1


def _end_of_atom(pattern: str, place: int) -> int:
    """Where the character, escape or class that starts at `place` ends."""
    if pattern[place] == "\\":
        return place + 2
    if pattern[place] != "[":
        return place + 1
    place += 1
    if pattern[place : place + 1] == "^":
        place += 1
    if pattern[place : place + 1] == "]":
        place += 1
    depth = 1
    while place < len(pattern) and depth:
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            depth += 1
        elif pattern[place] == "]":
            depth -= 1
        place += 1
    return place
