"""What every client is asked to do. Greedy, so that an answer can be compared with its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
TOOL_QUESTION = "Is it sunny in Rome?"
FORM_QUESTION = "Describe Rome: its name, its country, and whether it is old."


ShortText = Annotated[str, Field(max_length=40)]  # small models repeat themselves in a free text


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Rome", "Paris"]
    days: int


class Place(BaseModel):
    """What a typed answer holds: texts, a choice, a truth value, and a nested form behind a `$ref`."""

    name: ShortText
    country: ShortText
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
