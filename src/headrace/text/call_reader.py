"""Reads one call of a function while it is written: an object with name and arguments, or arguments whose name is known."""

from __future__ import annotations

import json
from collections.abc import Callable

from headrace.text.json_scanner import JsonScanner, Scan
from headrace.text.tokenizer import replace_surrogates

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = frozenset({"name", "type", "id", *ARGUMENT_KEYS})
_SPACE = frozenset(" \t\r\n")


class CallReader:
    """Takes characters (`push`) from the call's first brace on.

    `name` is set once the call has begun, which needs the arguments to have begun too; from then on `take` gives more of their text. Arguments
    come as the model wrote them; those that it wrote as a string of JSON are taken out of it. Until `name` is set nothing is certain.

    `known` says whether a name may be called. With `bare`, which is for objects that no marker announces, arguments must be there and
    nothing that calls do not have: most objects that are no calls are then told by their first key.
    """

    def __init__(self, *, name: str | None, known: Callable[[str], bool], bare: bool) -> None:
        self.name: str | None = None
        self._known = known
        self._bare = bare
        self._read_name: str | None = None
        self._arguments: list[str] = []  # not taken yet
        self._complete = False  # all arguments have been read
        self._buffer: list[str] = []  # the value that is being read, or the key
        self._key = ""
        self._scanner: JsonScanner | None = None
        self._step = self._start if name is None else self._read_argument
        if name is not None:
            self._read_name = self.name = name
            self._scanner = JsonScanner()

    def push(self, char: str) -> Scan:
        """MORE; DONE: the call ends with this character; BROKEN: this character is no part of a call (nor does it become one later)."""
        return self._step(char)

    def take(self) -> str:
        """Arguments since the last time; empty before `name` is set."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    # One method for each state of the object.

    def _start(self, char: str) -> Scan:
        if char != "{":
            return Scan.BROKEN
        self._step = self._between
        return Scan.MORE

    def _between(self, char: str) -> Scan:
        """Before a key, or behind a value."""
        if char in _SPACE or char == ",":
            return Scan.MORE
        if char == "}":
            return self._end()
        if char != '"':
            return Scan.BROKEN
        self._scanner, self._buffer = JsonScanner(), []
        self._step = self._read_key
        return self._read_key(char)

    def _read_key(self, char: str) -> Scan:
        assert self._scanner is not None
        self._buffer.append(char)
        if self._scanner.push(char) is Scan.DONE:
            self._key = "".join(self._buffer)[1:-1]
            if self._bare and self._key not in CALL_KEYS:
                return Scan.BROKEN
            self._step = self._colon
        return Scan.MORE

    def _colon(self, char: str) -> Scan:
        if char == ":":
            self._step = self._value
        elif char not in _SPACE:
            return Scan.BROKEN
        return Scan.MORE

    def _value(self, char: str) -> Scan:
        if char in _SPACE:
            return Scan.MORE
        self._scanner, self._buffer = JsonScanner(), []
        if self._key in ARGUMENT_KEYS and char == "{" and not self._complete:
            self.name = self._read_name  # where the name comes later, the arguments wait for it
            self._step = self._read_argument
        else:
            self._step = self._read_other
        return self._step(char)

    def _read_argument(self, char: str) -> Scan:
        """Inside arguments that are an object."""
        assert self._scanner is not None
        scan = self._scanner.push(char)
        if scan is Scan.BROKEN:
            return scan
        self._arguments.append(char)
        if scan is not Scan.DONE:
            return Scan.MORE
        if self._key:
            self._complete = True
            self._step = self._between
            return Scan.MORE
        return Scan.DONE

    def _read_other(self, char: str) -> Scan:
        """Inside a value that may be the name, arguments in another form, or of no interest."""
        assert self._scanner is not None
        scan = self._scanner.push(char)
        if scan is Scan.BROKEN:
            return scan
        if scan is not Scan.AFTER:
            self._buffer.append(char)
        if scan is Scan.MORE:
            return scan
        if not self._take_value("".join(self._buffer)):
            return Scan.BROKEN
        self._step = self._between
        return Scan.MORE if scan is Scan.DONE else self._between(char)

    def _take_value(self, text: str) -> bool:
        if self._key == "name" and self._read_name is None:
            name = _string(text)
            self._read_name = name
            return name is not None and name != "" and self._known(name)
        if self._key in ARGUMENT_KEYS and not self._complete:
            inner = _string(text)
            self._arguments.append("{}" if text == "null" or inner == "" else text if inner is None else inner)
            self._complete = True
        return True

    def _end(self) -> Scan:
        """The object's last brace."""
        if self.name is None:
            if self._read_name is None or (self._bare and not self._complete):
                return Scan.BROKEN
            self.name = self._read_name
            if not self._complete:
                self._arguments.append("{}")
        return Scan.DONE


def _string(text: str) -> str | None:
    """The value of a JSON string; None for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return replace_surrogates(value) if isinstance(value, str) else None
