import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.answer_events import PlainParser
from headrace.text.reasoning import FORMATS, ReasoningCounter, ReasoningParser, format_of_template
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats import FORMATS as TOOL_FORMATS
from headrace.text.tool_parser import ToolCallParser
from tests.text.answer_text import Parts, read
from tests.text.test_tool_parser import cut

THINK = FORMATS["qwen3"]


def parser(*, opened: bool = False, tools: bool = False, include: bool = True) -> ReasoningParser:
    inner = ToolCallParser(TOOL_FORMATS["hermes"], ["f"]) if tools else PlainParser()
    return ReasoningParser(THINK, inner, opened=opened, include=include)


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>\nHm.\n</think>\n\nHi.\n", False, [("think", "Hm."), ("say", "Hi.\n")]),
        ("\n<think>Hm.</think>Hi", False, [("think", "Hm."), ("say", "Hi")]),
        ("<think>\n\n</think>\n\nHi", False, [("say", "Hi")]),
        ("Hm.\n\nSo.</think>Hi", True, [("think", "Hm.\n\nSo."), ("say", "Hi")]),
        ("<think>\nHm.</think>Hi", True, [("think", "Hm."), ("say", "Hi")]),
        ("Hm. </thin", True, [("think", "Hm. </thin")]),
        ("<think>Hm.\n", False, [("think", "Hm.\n")]),
        ("Hi <think>x</think>", False, [("say", "Hi <think>x</think>")]),
        ("<thin", False, [("say", "<thin")]),
        ("<thin", True, [("think", "<thin")]),
        (" \n", False, [("say", " \n")]),
        ("</think>\nHi", True, [("say", "Hi")]),
        ("a</think>b</think>c", True, [("think", "a"), ("say", "b</think>c")]),
    ],
)
def test_reasoning_and_content(text: str, opened: bool, parts: Parts) -> None:
    assert read(lambda: parser(opened=opened), text) == parts
    assert read(lambda: parser(opened=opened), *text) == parts


def test_calls_behind_the_reasoning() -> None:
    text = '<think>I call <tool_call>{"name": "f", "arguments": {}}.</think>\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    thought = 'I call <tool_call>{"name": "f", "arguments": {}}.'
    assert read(lambda: parser(tools=True), *text) == [("think", thought), ("call", "f", '{"a": 1}')]
    assert read(lambda: parser(tools=True, include=False), *text) == [("call", "f", '{"a": 1}')]


fragments = st.sampled_from(["<think>", "</think>", "<", "/think>", "\n", " ", "a", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"])


@settings(max_examples=300, deadline=None)
@given(opened=st.booleans(), tools=st.booleans(), pieces=st.lists(fragments, max_size=12), cuts=st.lists(st.integers(1, 7), max_size=60))
def test_nothing_depends_on_the_cut(opened: bool, tools: bool, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert read(lambda: parser(opened=opened, tools=tools), *cut(text, cuts)) == read(lambda: parser(opened=opened, tools=tools), text)


def test_where_the_prompt_stands() -> None:
    assert THINK.left_open("<|im_start|>assistant\n<think>\n")
    assert not THINK.left_open("<think>\n\n</think>\n\n")
    assert THINK.is_over("<think>\n\n</think>\n\n")
    assert not THINK.is_over("assistant\n")


@pytest.mark.parametrize(("template", "name"), [(None, None), ("{{ messages }}", None), ("<think></think>", "qwen3"), ("[THINK][/THINK]", "mistral")])
def test_the_template_tells_the_format(template: str | None, name: str | None) -> None:
    assert format_of_template(template) == name


@pytest.mark.parametrize(
    ("text", "opened"),
    [("<think>Hm.</think>Hi", False), ("\n\n<think>Hm", False), ("Hm.</think>Hi <think>", True), ("Hi</think>", False), ("<th", False)],
)
def test_reasoning_tokens_are_counted_with_their_markers(byte_level: Tokenizer, text: str, opened: bool) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    texts = [byte_level.decode(ids[:count]) for count in range(1, len(ids) + 1)]
    if opened or "<think>" in text:
        wanted = next((count for count, part in enumerate(texts, start=1) if "</think>" in part), len(ids))
    else:
        wanted = len(ids) if text == "<th" else 0
    for size in (1, 2, len(ids)):
        counter = ReasoningCounter(THINK, byte_level, opened=opened)
        for place in range(0, len(ids), size):
            counter.push(tuple(ids[place : place + size]))
        assert counter.count == wanted
