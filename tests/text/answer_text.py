"""Answers as events, and the events of any cut of a text as one value that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.text.answer_events import AnswerParser, ContentText, Event, ReasoningText, ToolCallArguments, ToolCallBegin

Parts = list[tuple[str, ...]]  # ("say", text), ("think", text), ("call", name, arguments)


def joined(events: Sequence[Event]) -> Parts:
    """The parts of an answer. Checks that calls are numbered in order, that ids differ, and that no event is empty."""
    parts: Parts = []
    ids: set[str] = set()
    for event in events:
        last = parts[-1] if parts else ("",)
        match event:
            case ContentText() | ReasoningText():
                kind = "say" if isinstance(event, ContentText) else "think"
                assert event.text
                if last[0] == kind:
                    parts[-1] = (kind, last[1] + event.text)
                else:
                    parts.append((kind, event.text))
            case ToolCallBegin():
                assert event.index == len(ids)
                assert event.id not in ids
                ids.add(event.id)
                parts.append(("call", event.name, ""))
            case ToolCallArguments():
                assert event.text
                assert event.index == len(ids) - 1
                assert last[0] == "call"
                parts[-1] = (*last[:2], last[2] + event.text)
    return parts


def read(new_parser: Callable[[], AnswerParser], *pieces: str) -> Parts:
    """What a parser makes of a text that comes in these pieces."""
    parser = new_parser()
    events = [event for piece in pieces for event in parser.push(piece)]
    parts = joined([*events, *parser.finish()])
    assert parser.called == any(part[0] == "call" for part in parts)
    return parts
