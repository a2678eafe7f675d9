import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.answer_events import PlainParser, ToolCallArguments
from headrace.text.tool_formats import FORMATS, format_of_template
from headrace.text.tool_parser import ToolCallParser
from tests.text.answer_text import Parts, read

NAMES = ("get_weather", "f")
OPEN, SEP, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

CASES: list[tuple[str, str, Parts]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("call", "f", '{"a": 1}')]),
    (
        "hermes",
        'Sure.\n<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}\\""}}</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
        [("say", "Sure."), ("call", "f", '{"a": "</tool_call>}\\""}'), ("call", "g", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> Done.', [("call", "f", "{}"), ("say", "Done.")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("call", "f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": 3, "name": "f", "arguments": null}</tool_call>', [("call", "f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": [1, {"b": -2.5e3}]}}', [("call", "f", '{"a": [1, {"b": -2.5e3}]}')]),
    # no call
    ("hermes", " In <tool_call> tags, a < b <tool", [("say", " In <tool_call> tags, a < b <tool")]),
    ("hermes", '<tool_call>{"city": "Rome"}</tool_call>', [("say", '<tool_call>{"city": "Rome"}</tool_call>')]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', [("say", '<tool_call>{"name": 5, "arguments": {}}')]),
    ("hermes", '<tool_call>\n{"name": "f", "argu', [("say", '<tool_call>\n{"name": "f", "argu')]),
    ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}', [("say", "<tool_call>"), ("call", "f", "{}")]),
    # broken after it has begun: the call stands as the model wrote it
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [("call", "f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": </tool_call>ok', [("call", "f", '{"a": '), ("say", "ok")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [("call", "f", '{"a": 1}')]),
    (
        "llama3_json",
        '{"type": "function", "name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {}}',
        [("call", "f", "{}"), ("call", "get_weather", "{}")],
    ),
    ("llama3_json", '<|python_tag|>{"name": "g", "parameters": {"a": 1}}', [("call", "g", '{"a": 1}')]),
    ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}', [("say", '{"name": "Bob", "parameters": {"age": 3}}')]),
    ("llama3_json", '{"name": "f"}', [("say", '{"name": "f"}')]),
    ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}', [("say", '{"answer": {"name": "f", "parameters": {}}}')]),
    ("llama3_json", 'Look: {"name": "f", "parameters": {}}', [("say", 'Look: {"name": "f", "parameters": {}}')]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"x": 1}', [("call", "f", "{}"), ("say", '; {"x": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        [("call", "f", '{"a": "]"}'), ("call", "g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}] Bye', [("call", "f", "{}"), ("say", "Bye")]),
    ("mistral", 'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', [("say", "Hm."), ("call", "f", '{"a": 1}'), ("call", "g", '{"b": 2}')]),
    ("mistral_args", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("call", "f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS] is a marker [TOOL", [("say", "[TOOL_CALLS] is a marker [TOOL")]),
    (
        "deepseek_v3",
        f'Hi{BEGIN}{OPEN}function{SEP}f\n```json\n{{"a": "```"}}\n```{CLOSE}\n{OPEN}function{SEP}g\n```json\n{{}}\n```{CLOSE}{END}',
        [("say", "Hi"), ("call", "f", '{"a": "```"}'), ("call", "g", "{}")],
    ),
    ("deepseek_v31", f'{BEGIN}{OPEN}f{SEP}{{"a": 1}}{CLOSE}{OPEN}g{SEP}{{}}{CLOSE}{END}', [("call", "f", '{"a": 1}'), ("call", "g", "{}")]),
    (
        "json",
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]',
        [("call", "f", '{"a": 1}'), ("call", "get_weather", "{}")],
    ),
    ("json", ' \n{"name": "f", "arguments": {}} and more', [("call", "f", "{}"), ("say", "and more")]),
    ("json", "[1, 2]", [("say", "[1, 2]")]),
    ("json", "  \n", [("say", "  \n")]),
]


def parser(name: str) -> ToolCallParser:
    return ToolCallParser(FORMATS[name], NAMES)


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_calls_and_content(name: str, text: str, parts: Parts) -> None:
    assert read(lambda: parser(name), text) == parts
    assert read(lambda: parser(name), *text) == parts


def written(name: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    """Calls as the format's own grammar makes them."""
    form = FORMATS[name]
    texts = (form.before.replace("{name}", function) + json.dumps(arguments) + form.after for function, arguments in calls)
    return form.opens + form.between.join(texts) + form.closes


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", '"}]', "\\", "<think>", CLOSE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=6), values, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), calls=calls, cuts=st.lists(st.integers(1, 9), max_size=60))
def test_what_the_grammar_writes_is_read_whatever_the_cut(name: str, calls: list[tuple[str, dict[str, object]]], cuts: list[int]) -> None:
    text = written(name, calls)
    assert read(lambda: parser(name), *cut(text, cuts)) == [("call", function, json.dumps(arguments)) for function, arguments in calls]


fragments = st.sampled_from(
    [marker for form in FORMATS.values() for marker in form.markers]
    + [
        '{"name": "f", "arguments": {',
        '{"name": "f"',
        '"arguments": ',
        '{"a": 1}',
        "}",
        "]",
        "[",
        ",",
        ";",
        '"',
        "\\",
        "f",
        " ",
        "\n",
        "<",
        "[TO",
        "text",
        "{",
    ]
)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), pieces=st.lists(fragments, max_size=14), cuts=st.lists(st.integers(1, 7), max_size=80))
def test_no_text_depends_on_the_cut_or_is_lost(name: str, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    whole = read(lambda: parser(name), text)
    assert read(lambda: parser(name), *cut(text, cuts)) == whole
    if not any(part[0] == "call" for part in whole):
        assert "".join(part[1] for part in whole) == text


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, place = [], 0
    for size in sizes:
        pieces.append(text[place : place + size])
        place += size
    return [*pieces, text[place:]]


def test_arguments_come_while_they_are_written() -> None:
    reader = parser("hermes")
    assert reader.push('<tool_call>{"name": "f", "argum') == []
    begin, first = reader.push('ents": {"a": "x')
    assert (begin.name, first.text) == ("f", '{"a": "x')
    assert reader.push("yz") == [ToolCallArguments(index=0, text="yz")]
    assert reader.push('"}}</tool') == [ToolCallArguments(index=0, text='"}')]
    assert reader.finish() == []


def test_text_that_cannot_become_a_marker_is_not_held() -> None:
    reader = parser("hermes")
    assert [event.text for event in reader.push("a <b")] == ["a <b"]
    assert reader.push(" <tool_c") == []
    assert [event.text for event in reader.push("ard")] == [" <tool_card"]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        " \n" * 20_000,
        '<tool_call>{"name": "f"}' + " \n" * 20_000,
        '<tool_call>{"a": "' * 10_000,
        "<tool_call>{" * 20_000,
        "<" * 100_000,
    ],
)
def test_hostile_answers_cost_little(text: str) -> None:
    reader = parser("hermes")
    started = time.process_time()
    for place in range(0, len(text), 4):
        reader.push(text[place : place + 4])
    reader.finish()
    assert time.process_time() - started < 5


def test_halves_of_surrogates_in_arguments_can_be_encoded() -> None:
    parts = read(lambda: parser("hermes"), '<tool_call>{"name": "\\ud800", "arguments": "\\udfff"}</tool_call>')
    assert parts == [("call", "\ufffd", "\ufffd")]


def test_plain_text_is_content() -> None:
    assert read(PlainParser, "<tool_call>", "", "x") == [("say", "<tool_call>x")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("{{ tools }}<tool_call></tool_call>", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}[TOOL_CALLS][ARGS]", "mistral_args"),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ('{{ tools }}{"name": .., "parameters": ..}', "llama3_json"),
        ("{{ tools }}", "json"),
    ],
)
def test_the_template_tells_the_format(template: str | None, name: str) -> None:
    assert format_of_template(template) == name


def test_ids_fit_their_family() -> None:
    assert len({FORMATS["hermes"].new_id() for _ in range(50)}) == 50
    for name in ("mistral", "mistral_args"):
        value = FORMATS[name].new_id()
        assert len(value) == 9
        assert value.isalnum()
