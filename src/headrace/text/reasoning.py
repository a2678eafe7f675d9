"""Splits what a model thinks from what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.text.answer_events import AnswerParser, Event, ReasoningText

if TYPE_CHECKING:  # the command line reads the names of the formats and needs no tokenizer for that
    from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    begin: str
    end: str
    always_open: bool = False  # an answer is reasoning up to `end`, even where neither it nor the prompt has `begin`

    def left_open(self, prompt_end: str) -> bool:
        """Whether the prompt, of which this is the last part, has begun the reasoning."""
        return prompt_end.rstrip().endswith(self.begin)

    def is_over(self, prompt_end: str) -> bool:
        """Whether the prompt has ended the reasoning: templates write an empty one where none is wanted."""
        return prompt_end.rstrip().endswith(self.end)


FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(begin="<think>", end="</think>", always_open=True),
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]"),
    "qwen3": ReasoningFormat(begin="<think>", end="</think>"),
}


def format_of_template(template: str | None) -> str | None:
    """The name of the format whose markers a chat template has, or None."""
    template = template or ""
    return next((name for name in ("qwen3", "mistral") if FORMATS[name].end in template), None)


class ReasoningParser:
    """An `AnswerParser` that takes the reasoning off the beginning and gives the rest to another one.

    `opened`: the answer begins inside of the reasoning. Line ends next to the markers are dropped. An answer that ends before its reasoning
    does has no content. Without `include`, reasoning becomes no event.
    """

    def __init__(self, format: ReasoningFormat, inner: AnswerParser, *, opened: bool, include: bool = True) -> None:
        self._format = format
        self._inner = inner
        self._include = include
        self._held = ""  # no event yet
        self._opened = opened
        self._open: bool | None = None  # whether this is reasoning; None: not known yet
        self._said = False  # something of the reasoning, or of what follows it
        self._skips = False  # line ends, behind the end of the reasoning

    @property
    def called(self) -> bool:
        return self._inner.called

    def push(self, text: str) -> list[Event]:
        self._held += text
        if self._open is None and not self._decide():
            return []
        return self._reason() if self._open else self._answer()

    def finish(self) -> list[Event]:
        if self._open is None:
            self._open = self._opened
        events = self._reasoned(self._take()) if self._open else self._answer()
        return events + self._inner.finish()

    def _decide(self) -> bool:
        """The marker may stand at the beginning only; a prompt that has it already does not keep models from writing it again."""
        head = self._held.lstrip()
        if not head or (len(head) < len(self._format.begin) and self._format.begin.startswith(head)):
            return False
        begins = head.startswith(self._format.begin)
        if begins:
            self._held = head[len(self._format.begin) :]
        self._open = begins or self._opened
        return True

    def _reason(self) -> list[Event]:
        thought, ended, rest = self._held.partition(self._format.end)
        if ended:
            self._held = rest
            self._open, self._skips = False, True
            return self._reasoned(thought.rstrip("\n")) + self._answer()
        kept = next(size for size in range(min(len(self._format.end) - 1, len(thought)), -1, -1) if thought.endswith(self._format.end[:size]))
        certain = thought[: len(thought) - kept].rstrip("\n")
        self._held = thought[len(certain) :]
        return self._reasoned(certain)

    def _reasoned(self, text: str) -> list[Event]:
        if not self._said:
            text = text.lstrip("\n")
        self._said = self._said or bool(text)
        return [ReasoningText(text=text)] if text and self._include else []

    def _answer(self) -> list[Event]:
        text = self._take()
        if self._skips:
            text = text.lstrip("\n")
            self._skips = not text
        return self._inner.push(text) if text else []

    def _take(self) -> str:
        text, self._held = self._held, ""
        return text


class ReasoningCounter:
    """Counts the tokens of an answer that are reasoning, its markers among them."""

    def __init__(self, format: ReasoningFormat, tokenizer: Tokenizer, *, opened: bool) -> None:
        self.count = 0
        self._tokenizer = tokenizer
        self._begin = format.begin.encode()
        self._end = format.end.encode()
        self._open: bool | None = True if opened else None
        self._tail = b""

    def push(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            if self._open is False:
                return
            self.count += 1
            self._tail += self._tokenizer.token_bytes(token_id)
            if self._open is None:
                head = self._tail.lstrip()
                if head.startswith(self._begin):
                    self._open = True
                elif not self._begin.startswith(head):
                    self._open, self.count = False, 0
            if self._open and self._end in self._tail:
                self._open = False
            elif self._open:
                self._tail = self._tail[-len(self._end) :]
