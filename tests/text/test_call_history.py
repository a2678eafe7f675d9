import json
from typing import Any

import pytest

from headrace.text.call_history import CallHistory
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

START = "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }} {{ m.name }}){% endif %}{% endfor %}"
JSON = START + "{{ c.function.arguments | tojson }}" + END
TEXT = START + "{{ '' + c.function.arguments }}" + END
EITHER = START + "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}" + END
ITEMS = START + "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}" + END
NINE = START + "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_CALLS]{{ c.id }}" + END


def history(arguments: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "call_0123456789"},
    ]


@pytest.mark.parametrize(
    ("source", "arguments", "written"),
    [
        *((source, '{"a":"é"}', '{"a": "é"}') for source in (JSON, TEXT, EITHER)),
        (ITEMS, '{"a":"é"}', "a=é;"),
        (JSON, '{"a": "cu', json.dumps('{"a": "cu')),
        *((source, '{"a": "cu', '{"a": "cu') for source in (TEXT, EITHER)),
        (ITEMS, '{"a": "cu', 'arguments={"a": "cu;'),
        (TEXT, "", "{}"),
        (JSON, "[1]", '"[1]"'),
        (EITHER, "null", "null"),
    ],
)
def test_arguments_are_written_as_the_template_takes_them(byte_level: Tokenizer, source: str, arguments: str, written: str) -> None:
    text = ChatTemplate(source, byte_level).render(history(arguments), add_generation_prompt=False)
    assert text == f"[user]x[assistant]{written}[tool]42(call_0123456789 f)"


def test_ids_are_shortened_alike_where_they_must_be(byte_level: Tokenizer) -> None:
    text = ChatTemplate(NINE, byte_level).render(history("{}"), add_generation_prompt=False)
    call, result = text.split("[TOOL_CALLS]")[1][:9], text.split("(")[1][:9]
    assert call == result
    assert call.isalnum()
    messages = history("{}")
    messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = "abcdefgh1"
    assert "[TOOL_CALLS]abcdefgh1" in ChatTemplate(NINE, byte_level).render(messages, add_generation_prompt=False)


def test_a_template_that_writes_nothing_of_calls_is_given_objects() -> None:
    probed = CallHistory.probe(lambda messages: None, "")
    assert (probed.takes_objects, probed.takes_texts, probed.short_ids) == (False, False, False)
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    assert probed.fit(turn) == turn
