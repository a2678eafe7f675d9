"""One grammar for a whole answer: reasoning, calls of tools, and the form of what is said, in the Lark notation of the llguidance library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar import form_rule, json_rule, lark_regex, refusal
from headrace.text.reasoning import ReasoningFormat
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats import ToolFormat
from headrace.text.tools import FunctionTool

FORM_RULE = "form"
MAX_CALLS = 32  # in one answer that a grammar holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """What a grammar has to know of the reasoning before an answer."""

    format: ReasoningFormat
    opened: bool  # the prompt has begun it
    budget: int | None = None  # most tokens of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """What a grammar has to know of calls."""

    format: ToolFormat
    tools: Mapping[int, FunctionTool]  # by their place in the request; at least one
    required: bool  # the answer is calls and nothing else
    most: int = MAX_CALLS  # calls


class SchemaError(ValueError):
    """A tool's arguments cannot be held by a grammar. The message can follow "cannot be used:"."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index  # of the tool


def answer_grammar(tokenizer: Tokenizer, thinking: Thinking | None, calling: Calling | None, structured: StructuredOutputs | None) -> str | None:
    """The grammar's text, or None where nothing has to be held that `structured` does not hold by itself.

    Raises `SchemaError`, and `InvalidRequest` for a form that cannot be kept.
    """
    writer = _Writer(tokenizer)
    free = False  # the answer may be any text, an unbounded reasoning among others
    if calling is not None and calling.required:
        body = writer.calls(calling)
    elif structured is not None:
        if thinking is None and calling is None:
            return None
        body = writer.form(structured) + (f" | {writer.calls(calling)}" if calling else "")
    elif calling is not None and any(tool.strict for tool in calling.tools.values()) and _lead(calling.format):
        body, free = writer.text_with_calls(calling), True
    elif thinking is not None and thinking.budget is not None:
        body, free = writer.any_tokens(), True
    else:
        return None
    start = writer.rule("answer", body)
    if thinking is not None and (thinking.opened or not free or thinking.budget is not None):
        start = f"{writer.thinking(thinking, needed=free)} {start}"
    return writer.source(start)


def arguments_rule(index: int) -> str:
    """The rule that holds the arguments of a tool."""
    return f"arguments_{index}"


def single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the one token that is this text, or None."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def _lead(format: ToolFormat) -> str:
    """The text that every answer with calls has before the first of them; empty where calls begin as other text might."""
    lead = format.openers[0] if format.openers else ""
    return lead if lead and (format.opens + format.before).startswith(lead) else ""


class _Writer:
    """Methods write rules and return what refers to them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._rules: list[str] = []
        self._tokenizer = tokenizer
        self._ends = {*tokenizer.stop_token_ids, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))}

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])

    def rule(self, name: str, body: str, *, attributes: str = "") -> str:
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text; control tokens in it are such."""
        pattern = self._tokenizer.control_pattern
        terms, place = [], 0
        for found in pattern.finditer(text) if pattern else ():
            terms += [json.dumps(text[place : found.start()]), f"<[{self._tokenizer.special_tokens[found[0]]}]>"]
            place = found.end()
        terms.append(json.dumps(text[place:]))
        return " ".join(term for term in terms if term != '""') or '""'

    def any_tokens(self, *, but: Sequence[int] = (), most: int | None = None) -> str:
        """Tokens without regard to their text; none that ends the answer."""
        if most == 0:
            return ""
        return f"<[^{','.join(map(str, sorted({*self._ends, *but})))}]>" + ("*" if most is None else f"{{0,{most}}}")

    def calls(self, calling: Calling) -> str:
        """Calls and nothing else."""
        format = calling.format
        call = self.rule("call", " | ".join(self._call(format.before, index, tool, format) for index, tool in calling.tools.items()))
        return self.rule("calls", f"{self.literal(format.opens)} {self._several(call, calling)} {self.literal(format.closes)}")

    def text_with_calls(self, calling: Calling) -> str:
        """Any text, in which what announces calls is followed by them."""
        format, lead = calling.format, _lead(calling.format)
        self._rules.append("TEXT: /(?s:.*)/")
        marker = self.literal(lead)
        rest = "TEXT"
        announced = f"TEXT {marker}"
        if not marker.startswith("<["):  # a marker that is text like any other
            self.rule("announced", announced, attributes="[lazy]")
            self._rules.append(f"UNANNOUNCED: TEXT & ~/(?s:.*){lark_regex(re.escape(lead))}(?s:.*)/")
            announced, rest = "announced", "UNANNOUNCED"
        before = format.before if format.opens else format.before.removeprefix(lead)
        call = self.rule("call", " | ".join(self._call(before, index, tool, format) for index, tool in calling.tools.items()))
        if format.opens:
            call = f"{self.literal(format.opens.removeprefix(lead))} {self._several(call, calling)} {self.literal(format.closes)}"
        return f"({announced} {call}){'*' if calling.most > 1 else '?'} {rest}"

    def form(self, structured: StructuredOutputs) -> str:
        """What holds the whole of an answer, as a part of one. Raises `InvalidRequest`."""
        try:
            return self.rule(FORM_RULE, form_rule(structured))
        except (ValueError, RecursionError) as error:
            raise refusal(structured, str(error)) from None

    def thinking(self, thinking: Thinking, *, needed: bool) -> str:
        """The reasoning with its end; `needed`: it must be there, since what comes after it could be mistaken for it."""
        format = thinking.format
        end = single_token(self._tokenizer, format.end)
        if end is None:
            assert thinking.budget is None, "a budget counts tokens up to one that ends the reasoning"
            body = self.rule("thought", "/(?s:.*)/", attributes=f"[suffix={json.dumps(format.end)}]")
        else:
            body = f"{self.any_tokens(but=[end], most=thinking.budget)} <[{end}]>"
        self.rule("thinking", rf"{body} /\n{{0,2}}/")
        if thinking.opened:
            return "thinking"
        begin = single_token(self._tokenizer, format.begin)
        opening = f"{self.literal(format.begin) if begin is None else f'<[{begin}]>'} thinking"
        return opening if needed else f"({opening})?"

    def _several(self, call: str, calling: Calling) -> str:
        between = self.literal(calling.format.between)
        return call if calling.most == 1 else f"{call} ({between} {call}){{0,{calling.most - 1}}}"

    def _call(self, before: str, index: int, tool: FunctionTool, format: ToolFormat) -> str:
        try:
            arguments = json_rule({"type": "object", "properties": {}, **tool.parameters})
        except ValueError as error:
            raise SchemaError(index, str(error)) from None
        name = self.rule(arguments_rule(index), arguments)
        return f"{self.literal(before.replace('{name}', tool.name))} {name} {self.literal(format.after)}"
