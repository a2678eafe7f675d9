"""Finds the end of one JSON value in text that arrives character by character. Lenient: it counts brackets and knows strings, no more."""

from __future__ import annotations

from enum import Enum

_OUTSIDE = frozenset(" \t\r\n{}[]:,.+-")  # with letters and digits: all that JSON has outside of strings
_OPEN, _CLOSE = frozenset("{["), frozenset("}]")


class Scan(Enum):
    MORE = "more"  # the character belongs to the value
    DONE = "done"  # the character is the value's last one
    AFTER = "after"  # the value ended before the character
    BROKEN = "broken"  # no value goes on with this character


class JsonScanner:
    """One value. `push` takes its characters in order, from the first one on, until it says that the value is over."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_started")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._started = False

    def push(self, char: str) -> Scan:
        started, self._started = self._started, True
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return Scan.MORE if self._depth else Scan.DONE
            return Scan.MORE
        if char not in _OUTSIDE and char != '"' and not (char.isascii() and char.isalnum()):
            return Scan.BROKEN
        if not self._depth:
            if started:  # a number or a word, which ends where something else begins
                return Scan.MORE if char.isalnum() or char in ".+-" else Scan.AFTER
            if char in "}],:":
                return Scan.BROKEN
        if char == '"':
            self._in_string = True
        elif char in _OPEN:
            self._depth += 1
        elif char in _CLOSE:
            self._depth -= 1
            if not self._depth:
                return Scan.DONE
        return Scan.MORE
