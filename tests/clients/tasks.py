"""What every client is asked to do. Greedy, so that an answer can be compared with its stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
TOOL_QUESTION = "Is it sunny in Rome?"
FORM_QUESTION = "Describe Rome: its name, its country, and whether it is old."


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Rome", "Paris"]
    days: int


class Place(BaseModel):
    """What a typed answer holds: constrained and free texts, a list, and a nested form behind a `$ref`."""

    name: str
    country: str
    kind: Literal["city", "village"]
    old: bool
    position: Position


class Position(BaseModel):
    hemisphere: Literal["north", "south"]
    coastal: bool | None


WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather of a city.", "parameters": Weather.model_json_schema()},
}
