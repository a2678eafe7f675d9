"""Stop strings in text that arrives in pieces.

All stop strings of a request form one Aho-Corasick automaton. Its state after each character is the longest end of the text that may
still become a stop string: that is what must be held back, and all that is ever looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from headrace.errors import InvalidRequest

MAX_STOP_CHARS = 8192  # of all stop strings of a request together


class _Automaton:
    """States are beginnings of stop strings, numbered; 0 is the empty one."""

    __slots__ = ("depth", "fallback", "found", "next")

    def __init__(self, stop: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]  # characters in the state
        self.found: list[str | None] = [None]  # longest stop string that ends in the state
        for text in stop:
            state = 0
            for char in text:
                if char not in self.next[state]:
                    self.next[state][char] = len(self.next)
                    self.next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.found.append(None)
                state = self.next[state][char]
            self.found[state] = text
        self.fallback = [0] * len(self.next)  # the longest proper end of the state that is a state
        queue = list(self.next[0].values())
        for state in queue:
            for char, child in self.next[state].items():
                queue.append(child)
                self.fallback[child] = self.step(self.fallback[state], char)
                self.found[child] = self.found[child] or self.found[self.fallback[child]]

    def step(self, state: int, char: str) -> int:
        while state and char not in self.next[state]:
            state = self.fallback[state]
        return self.next[state].get(char, 0)


@lru_cache(maxsize=64)
def _automaton(stop: tuple[str, ...]) -> _Automaton:
    return _Automaton(stop)


class StopChecker:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    The first is the one that is complete first, and of those that end at the same character the longest; so the result does not depend
    on how the text was cut. Raises `InvalidRequest` if the stop strings together are longer than `MAX_STOP_CHARS`.
    """

    __slots__ = ("_automaton", "_held", "_include", "_matched", "_state")

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool = False) -> None:
        if sum(map(len, stop)) > MAX_STOP_CHARS:
            raise InvalidRequest(f"The stop strings have more than {MAX_STOP_CHARS} characters together.", param="stop")
        self._automaton = _automaton(tuple(stop)) if stop else None
        self._include = include_stop_str
        self._held = ""
        self._state = 0
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit, the stop string that matched or None). Nothing may be pushed after a match."""
        assert not self._matched, "text pushed after a stop string matched"
        automaton = self._automaton
        if automaton is None:
            return text, None
        state, step, found = self._state, automaton.step, automaton.found
        for index, char in enumerate(text):
            state = step(state, char)
            matched = found[state]
            if matched is not None:
                self._matched = True
                whole = self._held + text[: index + 1]
                self._held = ""
                return (whole if self._include else whole[: len(whole) - len(matched)]), matched
        self._state = state
        whole = self._held + text
        certain = len(whole) - automaton.depth[state]
        self._held = whole[certain:]
        return whole[:certain], None

    def finish(self) -> str:
        """The text that was held back, once no more comes."""
        held, self._held = self._held, ""
        return held
