"""Models of several families, as far as a chat's turn sees them: markers that are tokens, and templates that show how calls are written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headrace.text.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import write_byte_tokenizer

# text -> whether the tokenizer's file calls it special
MARKERS = {
    "<think>": False,
    "</think>": False,
    "[THINK]": True,
    "[/THINK]": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|python_tag|>": True,
    "[TOOL_CALLS]": True,
    "[ARGS]": True,
    "<｜tool▁calls▁begin｜>": False,
    "<｜tool▁calls▁end｜>": False,
    "<｜tool▁call▁begin｜>": False,
    "<｜tool▁call▁end｜>": False,
    "<｜tool▁sep｜>": False,
}
_MESSAGES = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content }}CALLS{% endfor %}"
)
_CALLS = "{% for call in message.tool_calls or [] %}BEFORE{{ call.function.name }}BETWEEN{{ ARGUMENTS }}AFTER{% endfor %}"
_ASSISTANT = "{% if add_generation_prompt %}[assistant]{% endif %}"


def template(before: str, between: str, after: str, *, arguments: str = "call.function.arguments | tojson", start: str = _ASSISTANT) -> str:
    calls = _CALLS.replace("BEFORE", before).replace("BETWEEN", between).replace("AFTER", after).replace("ARGUMENTS", arguments)
    return _MESSAGES.replace("CALLS", calls) + start


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    format: str
    template: str


HERMES = template('<tool_call>{"name": "', '", "arguments": ', "}</tool_call>")
THINKS = HERMES.replace(
    _ASSISTANT, "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
FAMILIES = [
    Family(format="hermes", template=HERMES),
    Family(format="hermes", template=THINKS),
    Family(format="llama3_json", template=template('{"name": "', '", "parameters": ', "}")),
    Family(format="mistral", template=template('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]")),
    Family(format="mistral_args", template=template("[TOOL_CALLS]", "[ARGS]", "")),
    Family(
        format="deepseek_v3",
        template=template(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", arguments="call.function.arguments + ''"
        ),
    ),
    Family(format="deepseek_v31", template=template("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")),
    Family(format="json", template=template("{{ '{' }}", ": ", "}")),
]


def marked_tokenizer(directory: Path) -> Tokenizer:
    """A byte a token, and one for each marker."""
    write_byte_tokenizer(directory)
    file = directory / "tokenizer.json"
    definition = json.loads(file.read_text())
    for token_id, (text, special) in enumerate(MARKERS.items(), start=259):
        definition["model"]["vocab"][text] = token_id
        token = {"id": token_id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        definition["added_tokens"].append(token)
    file.write_text(json.dumps(definition))
    return Tokenizer.load(directory)
