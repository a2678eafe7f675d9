"""What a turn makes of its model's reasoning: asked for or not, bounded, split off, counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.service import LoadedModel
from headrace.text import reasoning
from headrace.text.answer_events import AnswerParser
from headrace.text.answer_grammar import Thinking, single_token
from headrace.text.chat_template import ChatTemplate
from headrace.text.reasoning import ReasoningCounter, ReasoningFormat, ReasoningParser

MAX_BUDGET = 65_536  # tokens that a grammar counts

# For models whose template has no word for the effort: most tokens of reasoning.
EFFORT_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """What is wanted of the model's reasoning."""

    include: bool = True  # false: it is counted, but not returned
    budget: int | None = None  # most tokens of it; then its end is forced
    effort: str | None = None  # none: the template is told that none is wanted; minimal, low, medium, high, xhigh, max


class TurnReasoning:
    """One turn's. First `template_kwargs`, then `read_prompt`, then the rest.

    Raises `InvalidRequest` for options that would change nothing.
    """

    def __init__(self, model: LoadedModel, template: ChatTemplate, options: ReasoningOptions, *, budget_field: str, effort_field: str) -> None:
        self._tokenizer = model.tokenizer
        self._options = options
        self._format = _format(model, template)
        self._tells_effort = "reasoning_effort" in template.variables
        self._opened = False
        self._over = False
        self._budget = options.budget
        if options.budget is not None and self._format is None:
            raise InvalidRequest(f"{budget_field} is for models that reason, which this one does not; leave it out.", param=budget_field)
        if options.effort not in (None, "none") and not self._tells_effort:
            if self._format is None:
                raise InvalidRequest(
                    f"{effort_field} is for models that reason, which this one does not; leave it out.", param=effort_field, code="unsupported_value"
                )
            if self._budget is None:
                self._budget = EFFORT_BUDGETS[options.effort or "high"]
        if self._budget is not None and self._budget >= model.info.max_model_len:
            self._budget = None  # the context ends it before
        if self._budget is not None and self._budget > MAX_BUDGET:
            raise InvalidRequest(
                f"{budget_field} must be at most {MAX_BUDGET}, not {self._budget}; without it there is no bound.", param=budget_field
            )
        if self._budget is not None and self._format is not None and single_token(self._tokenizer, self._format.end) is None:
            param = budget_field if options.budget is not None else effort_field
            raise InvalidRequest(f"{param} cannot be held: this model has no token that ends its reasoning. Leave it out.", param=param)

    def template_kwargs(self, kwargs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """With what the template has to be told; what the request says itself stays."""
        effort = self._options.effort
        if effort is None:
            return kwargs
        told: dict[str, Any] = {"reasoning_effort": effort} if self._tells_effort else {}
        if effort == "none":
            told["enable_thinking"] = False
        return {**told, **(kwargs or {})}

    def read_prompt(self, prompt_end: str) -> None:
        """Learns from the prompt's last part whether it has begun the reasoning, or ended it."""
        if self._format is not None:
            self._over = self._format.is_over(prompt_end)
            self._opened = not self._over and (self._format.always_open or self._format.left_open(prompt_end))

    def for_grammar(self) -> Thinking | None:
        """None: the answer begins at once."""
        if self._format is None or self._over:
            return None
        return Thinking(format=self._format, opened=self._opened, budget=self._budget)

    @property
    def markers(self) -> tuple[str, ...]:
        return () if self._format is None else (self._format.begin, self._format.end)

    def wrap(self, parser: AnswerParser) -> AnswerParser:
        if self._format is None:
            return parser
        return ReasoningParser(self._format, parser, opened=self._opened, include=self._options.include)

    @property
    def new_counter(self) -> Callable[[], ReasoningCounter] | None:
        format = self._format
        return None if format is None else lambda: ReasoningCounter(format, self._tokenizer, opened=self._opened)


def _format(model: LoadedModel, template: ChatTemplate) -> ReasoningFormat | None:
    name: str | None = model.reasoning_parser
    if name == "auto":
        name = reasoning.format_of_template(template.source)
    return None if name in (None, "none") else reasoning.FORMATS[name]
