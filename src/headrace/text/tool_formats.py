"""How families of models write calls of tools. One row is read by `tool_parser.py` and written by `tool_grammar.py`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

_OBJECT = re.compile(r"\s*(?P<list>\[\s*)?")  # nothing, or the bracket of a list, stands between the marker and an object
_MISTRAL = re.compile(r"\s*(?:(?P<list>\[\s*)|(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*)?")
_DEEPSEEK = re.compile(r"\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*")


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return secrets.token_hex(5)[:9]  # Mistral's templates take nine letters and digits only


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    # How calls are read. White space around all of these belongs to the format.
    openers: tuple[str, ...]  # texts that announce a call; none begins another
    header: re.Pattern[
        str
    ]  # all that may stand between an opener and the call's first brace; `name`: the brace opens the arguments; `list`: calls are in brackets
    header_chars: re.Pattern[str]  # each beginning of a header fits this
    glue: tuple[str, ...] = ()  # texts between calls and behind them
    separators: tuple[str, ...] = ()  # characters after which another call may begin without an opener; in a list also a comma
    bare: bool = False  # a call may begin where the answer does, without an opener; then only a known name makes it a call
    # How calls are written; {name} is the function's.
    opens: str  # before the first call
    before: str  # before a call's arguments
    after: str  # after them
    between: str
    closes: str = ""  # after the last call
    new_id: Callable[[], str] = field(default=_new_id)

    @property
    def markers(self) -> tuple[str, ...]:
        """All that the reader looks for; where one is a control token, it must stay part of the text."""
        return (*self.openers, *self.glue, "[ARGS]", "[CALL_ID]", "<｜tool▁sep｜>")


_NAMED = re.compile(r"[^{]{0,200}")

FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        openers=("<tool_call>",),
        header=_OBJECT,
        header_chars=_OBJECT,
        glue=("</tool_call>",),
        opens="",
        before='<tool_call>\n{"name": "{name}", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
    ),
    "llama3_json": ToolFormat(
        openers=("<|python_tag|>",),
        header=_OBJECT,
        header_chars=_OBJECT,
        separators=(";",),
        bare=True,
        opens="",
        before='{"name": "{name}", "parameters": ',
        after="}",
        between="; ",
    ),
    "mistral": ToolFormat(
        openers=("[TOOL_CALLS]",),
        header=_MISTRAL,
        header_chars=_NAMED,
        opens="[TOOL_CALLS][",
        before='{"name": "{name}", "arguments": ',
        after="}",
        between=", ",
        closes="]",
        new_id=_short_id,
    ),
    "mistral_args": ToolFormat(  # from tokenizer version 11 on
        openers=("[TOOL_CALLS]",),
        header=_MISTRAL,
        header_chars=_NAMED,
        opens="",
        before="[TOOL_CALLS]{name}[ARGS]",
        after="",
        between="",
        new_id=_short_id,
    ),
    "deepseek_v3": ToolFormat(
        openers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        header=_DEEPSEEK,
        header_chars=_NAMED,
        glue=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        opens="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        closes="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": ToolFormat(
        openers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        header=_DEEPSEEK,
        header_chars=_NAMED,
        glue=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        opens="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        between="",
        closes="<｜tool▁calls▁end｜>",
    ),
    "json": ToolFormat(
        openers=(),
        header=_OBJECT,
        header_chars=_OBJECT,
        bare=True,
        opens="[",
        before='{"name": "{name}", "arguments": ',
        after="}",
        between=", ",
        closes="]",
    ),
}


TEXT_FORMAT = "hermes"  # in which `tool_prompt.py` asks for calls


def format_of_template(template: str | None) -> str:
    """The name of the format that a chat template shows its model. One that writes no tools gets them in Hermes form."""
    template = template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if "tool▁call" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template or "tools" not in template:
        return TEXT_FORMAT
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3_json"
    return "json"
