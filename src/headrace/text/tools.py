"""The tools of a conversation, and which of them the answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """One function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})  # JSON schema of the arguments
    strict: bool = False  # arguments keep the schema even where the model calls of its own accord

    def as_openai(self) -> dict[str, Any]:
        """The form that chat templates are written for."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What the answer has to do with the tools."""

    mode: Literal["none", "auto", "required"] = "auto"  # required: the answer is one or more calls, held by a grammar
    name: str | None = None  # with required: exactly one call of this function
