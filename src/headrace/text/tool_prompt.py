"""Tools for chat templates that know none: definitions, calls and results become text, in the form that Hermes models brought up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INSTRUCTIONS = """\
# Tools

You may call one or more functions to help with the user's question.

These are their signatures:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "FUNCTION", "arguments": {{...}}}}
</tool_call>"""


def tools_as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages without tools in them. Contents are strings; arguments are objects, or strings where they are no JSON objects.

    The tools go into the system message, results of calls into the user's turn that they belong to.
    """
    turns: list[dict[str, Any]] = []
    merges = False  # the last turn holds results, which the user's next words join: many templates want roles to take turns
    for message in messages:
        turn = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        is_result = turn["role"] == "tool"
        if is_result:
            turn = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
        elif message.get("tool_calls"):
            turn["content"] = "\n".join([*([turn["content"]] if turn["content"] else []), *map(_call_text, message["tool_calls"])])
        if merges and turn["role"] == "user":
            turns[-1]["content"] += "\n" + turn["content"]
        else:
            turns.append(turn)
        merges = is_result
    if tools:
        text = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if turns and turns[0]["role"] in ("system", "developer"):
            turns[0]["content"] = f"{turns[0]['content']}\n\n{text}" if turns[0]["content"] else text
        else:
            turns.insert(0, {"role": "system", "content": text})
    return turns


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {written}}}\n</tool_call>'
