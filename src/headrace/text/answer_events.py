"""What an answer is made of once its text has been read: content, reasoning and calls of tools.

An `AnswerParser` takes the text of one choice in any pieces. The events it gives, joined, are the same for every cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentText:
    """More of what is said to the user; never empty."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningText:
    """More of what the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallBegin:
    """A call begins. Its arguments follow, and end where the next call begins or the answer ends."""

    index: int  # of the call in the answer, from 0
    id: str  # unique
    name: str  # of the function


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments, as the model wrote it; never empty. Perhaps no valid JSON where no grammar holds it."""

    index: int
    text: str


Event = ContentText | ReasoningText | ToolCallBegin | ToolCallArguments


class AnswerParser(Protocol):
    """Reads one choice."""

    @property
    def called(self) -> bool:
        """Whether a call has begun."""

    def push(self, text: str) -> list[Event]:
        """The events that are certain now. What may be the beginning of a marker is held back."""

    def finish(self) -> list[Event]:
        """The rest. Nothing may be pushed after it."""


class PlainParser:
    """All text is content."""

    called = False

    def push(self, text: str) -> list[Event]:
        return [ContentText(text=text)] if text else []

    def finish(self) -> list[Event]:
        return []
