"""Tells calls of tools from content while the text of an answer arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from headrace.text.answer_events import ContentText, Event, ToolCallArguments, ToolCallBegin
from headrace.text.call_reader import CallReader
from headrace.text.json_scanner import Scan
from headrace.text.tool_formats import ToolFormat

_SPACE = " \t\r\n"


class ToolCallParser:
    """An `AnswerParser` for one format.

    It goes from character to character, so how the text is cut makes no difference. What might be a call is held until it is one: its name is
    read and its arguments begin. What turns out to be none is content, as the model wrote it. White space next to a call is dropped.

    `names`: the functions there are. Where a marker announces a call, the model may also name another one; that is the caller's affair.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        self.called = False
        self._format = format
        self._names = frozenset(names)
        self._count = 0  # calls that have ended
        self._out = _EventRun()
        self._held: list[str] = []  # characters that are no event yet
        self._link = ""  # of what is held, the part that may begin a marker: all but the white space before it
        self._separated = False  # behind a call: a separator came
        self._header = ""  # of what is held, the part behind the opener
        self._announced = False  # by an opener
        self._listed = False  # in brackets
        self._reader: CallReader | None = None
        self._begun = False  # the reader's call has become an event
        self._at_start = True  # nothing but white space came so far
        self._heads = _beginnings(format.openers) | {""}
        self._links = _beginnings((*format.openers, *format.glue)) | {""}
        self._notable = re.compile(f"[{re.escape(_SPACE + ''.join(opener[0] for opener in format.openers))}]")
        self._step: Callable[[str], None] = self._text

    def push(self, text: str) -> list[Event]:
        position = 0
        while position < len(text):
            if self._step == self._text and not self._held and not self._at_start:  # content, which need not be looked at one by one
                found = self._notable.search(text, position)
                end = found.start() if found else len(text)
                self._out.content(text[position:end])
                position = end
            if position < len(text):
                self._step(text[position])
                position += 1
        return self._out.take()

    def finish(self) -> list[Event]:
        if not (self._begun or self._step == self._behind or (self.called and not "".join(self._held).strip(_SPACE))):
            self._release()
        self._held.clear()
        return self._out.take()

    def _release(self, *, but: int = 0) -> None:
        """What is held, without the last so many characters, is content."""
        text = "".join(self._held)
        self._out.content(text[: len(text) - but])
        self._held = list(text[len(text) - but :])

    # One method for each state.

    def _text(self, char: str) -> None:
        """In content: held is white space, then perhaps the beginning of an opener."""
        self._held.append(char)
        if not self._link and char in _SPACE:
            return
        self._link += char
        if self._at_start and self._format.bare and self._link in ("{", "["):
            self._listed = False
            self._open(char, announced=False)
        elif self._link in self._format.openers:
            self._listed = False
            self._open("", announced=True)
        elif self._link not in self._heads:
            self._at_start = False
            rest = self._link[1:]  # what is no opener from its first character on may be one from a later one on
            while rest.lstrip(_SPACE) not in self._heads:
                rest = rest[1:]
            self._release(but=len(rest))
            self._link = rest.lstrip(_SPACE)

    def _open(self, first: str, *, announced: bool) -> None:
        """A call may begin; `first` is held already and belongs to its header."""
        self._at_start = False
        self._announced = announced
        self._header = self._link = ""
        self._step = self._head
        if first:
            self._read_head(first)

    def _head(self, char: str) -> None:
        """Before the call's first brace."""
        self._held.append(char)
        self._read_head(char)

    def _read_head(self, char: str) -> None:
        found = self._format.header.fullmatch(self._header) if char == "{" else None
        if found is not None:
            groups = found.groupdict()
            self._listed = self._listed or groups.get("list") is not None
            self._reader = CallReader(name=groups.get("name"), known=self._known, bare=not self._announced)
            self._step = self._call
            self._read_call(char)
            return
        self._header += char
        if not self._format.header_chars.fullmatch(self._header):
            self._give_up(char)

    def _known(self, name: str) -> bool:
        return self._announced or name in self._names

    def _call(self, char: str) -> None:
        if not self._begun:
            self._held.append(char)
        self._read_call(char)

    def _read_call(self, char: str) -> None:
        reader = self._reader
        assert reader is not None
        scan = reader.push(char)
        if reader.name is None:
            if scan is Scan.BROKEN:
                self._give_up(char)
            return
        if not self._begun:
            self._begun = self.called = True
            self._held.clear()
            self._out.begin(ToolCallBegin(index=self._count, id=self._format.new_id(), name=reader.name))
        self._out.arguments(self._count, reader.take())
        if scan is Scan.MORE:
            return
        self._count += 1
        self._reader = None
        self._begun = self._separated = False
        self._step = self._behind
        if scan is Scan.BROKEN:
            self._behind(char)

    def _give_up(self, char: str) -> None:
        """It is no call. The character that showed it may begin something else."""
        self._release(but=1)
        self._held.clear()
        self._link = ""
        self._reader = None
        self._step = self._text
        self._text(char)

    def _behind(self, char: str) -> None:
        """After a call: held is white space, then perhaps a separator, then perhaps the beginning of a marker."""
        self._held.append(char)
        if not self._link and char in _SPACE:
            return
        if not self._link and not self._separated and (char in self._format.separators or (self._listed and char == ",")):
            self._separated = True
            return
        self._link += char
        if self._link in self._format.glue or (self._listed and self._link == "]"):
            self._listed = self._listed and self._link != "]"
            self._separated = False
            self._link = ""
            self._held.clear()
        elif self._link in self._format.openers:
            self._listed = False
            self._open("", announced=True)
        elif self._separated and self._link == "{":
            self._open(char, announced=self._announced)
        elif self._link not in self._links:
            text = "".join(self._held).lstrip(_SPACE)
            self._held.clear()
            self._link = ""
            self._step = self._text
            for item in text:
                self._step(item)


class _EventRun:
    """Events in the making: texts of one kind that follow each other become one."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._parts: list[str] = []
        self._call: int | None = None  # whose arguments the parts are; None: content

    def content(self, text: str) -> None:
        self._append(None, text)

    def arguments(self, index: int, text: str) -> None:
        self._append(index, text)

    def begin(self, event: ToolCallBegin) -> None:
        self._close()
        self._events.append(event)

    def take(self) -> list[Event]:
        self._close()
        events, self._events = self._events, []
        return events

    def _append(self, call: int | None, text: str) -> None:
        if call != self._call:
            self._close()
            self._call = call
        if text:
            self._parts.append(text)

    def _close(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if text:
            self._events.append(ContentText(text=text) if self._call is None else ToolCallArguments(index=self._call, text=text))


def _beginnings(texts: Collection[str]) -> frozenset[str]:
    return frozenset(text[:length] for text in texts for length in range(1, len(text) + 1))
