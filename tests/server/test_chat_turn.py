"""A turn from its options to its grammar and its parser, for each family of models."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace.errors import InvalidRequest
from headrace.sampling_params import SamplingParams, StructuredOutputs
from headrace.server.chat_turn import ChatTurn, ReasoningOptions, TemplateOptions, prepare_turn
from headrace.server.schema import Message
from headrace.server.service import LoadedModel
from headrace.text.chat_template import ChatTemplate
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.grammar_vocabulary import GrammarVocabulary
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats import FORMATS
from headrace.text.tools import FunctionTool, ToolChoice
from tests.server.fakes import FakeGenerator, load
from tests.server.families import FAMILIES, HERMES, THINKS, Family, marked_tokenizer
from tests.text.answer_text import Parts, joined

CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}}, "required": ["city"]}
TOOLS = [FunctionTool(name="get_weather", parameters=CITY), FunctionTool(name="get_time")]
REQUIRED = ToolChoice(mode="required")
USER = Message(role="user", content="Hi")
FORM = StructuredOutputs(kind="json_schema", source=json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.format)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return marked_tokenizer(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module")
def library(tokenizer: Tokenizer) -> LLTokenizer:
    return GrammarVocabulary.of(tokenizer).library_tokenizer()


def model_of(tokenizer: Tokenizer, source: str, **parsers: str) -> LoadedModel:
    model = load(tokenizer, FakeGenerator(), context=8192)
    return dataclasses.replace(model, template=ChatTemplate(source, tokenizer), **parsers)


def turn_of(model: LoadedModel, *messages: Message, kwargs: dict[str, Any] | None = None, **options: Any) -> ChatTurn:
    template = TemplateOptions(template=model.template, kwargs=kwargs)
    return prepare_turn(model, messages=messages or [USER], template=template, **options)


def prompt_text(model: LoadedModel, turn: ChatTurn) -> str:
    return model.tokenizer.decode(turn.prompt_token_ids, skip_special_tokens=False)


def holds(library: LLTokenizer, tokenizer: Tokenizer, turn: ChatTurn, text: str) -> bool:
    """Whether the text is a whole answer under the turn's grammar, token for token."""
    assert turn.structured is not None
    assert turn.structured.kind == "grammar"
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(turn.structured.source), log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), turn.structured.source)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(tokenizer: Tokenizer, turn: ChatTurn, text: str) -> Parts:
    """What comes of an answer's tokens on their way through detokenizer and parser, one by one."""
    params = turn.apply(SamplingParams())
    detokenizer = IncrementalDetokenizer(tokenizer, shown_token_ids=params.shown_token_ids, continues=True)
    parser = turn.new_parser()
    events = [event for token_id in tokenizer.encode(text, add_special_tokens=False) for event in parser.push(detokenizer.push((token_id,)))]
    return joined([*events, *parser.push(detokenizer.finish()), *parser.finish()])


def written(name: str, *calls: tuple[str, str]) -> str:
    form = FORMATS[name]
    return form.opens + form.between.join(form.before.replace("{name}", function) + text + form.after for function, text in calls) + form.closes


@families
def test_forced_calls_are_written_and_read_in_the_familys_form(tokenizer: Tokenizer, library: LLTokenizer, family: Family) -> None:
    turn = turn_of(model_of(tokenizer, family.template), tools=TOOLS, tool_choice=REQUIRED)
    rome, noon = ("get_weather", '{"city": "Rome"}'), ("get_time", "{}")
    for calls in ([rome], [noon], [rome, noon], [rome, rome, rome]):
        text = written(family.format, *calls)
        assert holds(library, tokenizer, turn, text), (text, turn.structured)
        assert read(tokenizer, turn, text) == [("call", *call) for call in calls]
    bad = ["", "Hi", written(family.format, ("get_weather", '{"city": "Bonn"}')), written(family.format, ("get_time", '{"a": 1}'))]
    for text in (*bad, written(family.format, ("other", "{}")), written(family.format, rome) + "x"):
        assert not holds(library, tokenizer, turn, text), text
    one = turn_of(model_of(tokenizer, family.template), tools=TOOLS, tool_choice=ToolChoice(mode="required", name="get_time"))
    assert holds(library, tokenizer, one, written(family.format, noon))
    for calls in ([rome], [noon, noon]):
        assert not holds(library, tokenizer, one, written(family.format, *calls))


@families
def test_strict_calls_among_words(tokenizer: Tokenizer, library: LLTokenizer, family: Family) -> None:
    strict = [dataclasses.replace(tool, strict=True) for tool in TOOLS]
    turn = turn_of(model_of(tokenizer, family.template), tools=strict)
    if family.format in ("json", "llama3_json"):  # where a call begins as any other text may
        assert turn.structured is None
        return
    good = written(family.format, ("get_weather", '{"city": "Rome"}'))
    for text in ("Hi.", "Look. " + good, good + " There."):
        assert holds(library, tokenizer, turn, text), (text, turn.structured)
    assert read(tokenizer, turn, "Look.\n" + good) == [("say", "Look."), ("call", "get_weather", '{"city": "Rome"}')]
    assert not holds(library, tokenizer, turn, "Look. " + written(family.format, ("get_weather", '{"city": "Bonn"}')))


def test_markers_that_are_special_stay_in_the_text_of_chats_with_tools_only(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, next(family.template for family in FAMILIES if family.format == "mistral"))
    special = tokenizer.special_tokens
    assert set(turn_of(model, tools=TOOLS).shown_token_ids) == {special["[TOOL_CALLS]"], special["[ARGS]"]}
    assert turn_of(model).shown_token_ids == ()


@families
@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', '{"city": "Ro', "[1]", ""])
def test_earlier_calls_are_written_whatever_their_arguments(tokenizer: Tokenizer, family: Family, arguments: str) -> None:
    call = {"id": "call_12345678901234", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    history = [
        USER,
        Message(role="assistant", content=None, tool_calls=[call]),
        Message(role="tool", content="sunny", tool_call_id="call_12345678901234"),
    ]
    model = model_of(tokenizer, family.template)
    text = prompt_text(model, turn_of(model, *history, tools=TOOLS))
    assert "get_weather" in text.split("[assistant]", 1)[1]
    assert ("Rome" if "Rome" in arguments else "city" if "city" in arguments else arguments) in text.split("[assistant]", 1)[1]
    assert "sunny" in text


# Reasoning.


def test_a_model_that_begins_to_reason_itself(tokenizer: Tokenizer, library: LLTokenizer) -> None:
    model = model_of(tokenizer, THINKS)
    call = written("hermes", ("get_time", "{}"))
    turn = turn_of(model, tools=TOOLS, tool_choice=REQUIRED)
    text = f"<think>\nI call {call}.\n</think>\n\n{call}"
    assert holds(library, tokenizer, turn, text)
    assert holds(library, tokenizer, turn, call)
    assert not holds(library, tokenizer, turn, f"<think>{call}")
    assert read(tokenizer, turn, text) == [("think", f"I call {call}."), ("call", "get_time", "{}")]
    plain = turn_of(model)
    assert plain.structured is None
    assert read(tokenizer, plain, "<think>Hm.</think>Hi") == [("think", "Hm."), ("say", "Hi")]


def test_reasoning_that_the_prompt_opens_or_closes(tokenizer: Tokenizer, library: LLTokenizer) -> None:
    model = model_of(tokenizer, THINKS)
    off = turn_of(model, kwargs={"enable_thinking": False}, structured=FORM)
    assert prompt_text(model, off).endswith("[assistant]<think>\n\n</think>\n\n")
    assert off.structured is FORM
    assert read(tokenizer, off, "Hi") == [("say", "Hi")]
    none = turn_of(model, reasoning=ReasoningOptions(effort="none"))
    assert prompt_text(model, none).endswith("</think>\n\n")
    opens = model_of(tokenizer, HERMES + "{# </think> #}{% if add_generation_prompt %}<think>\n{% endif %}")
    turn = turn_of(opens, structured=FORM)
    assert read(tokenizer, turn, 'Hm.</think>\n\n{"a": 1}') == [("think", "Hm."), ("say", '{"a": 1}')]
    assert holds(library, tokenizer, turn, 'Hm.</think>\n\n{"a": 1}')
    assert not holds(library, tokenizer, turn, '{"a": 1}')
    hidden = turn_of(opens, reasoning=ReasoningOptions(include=False))
    assert read(tokenizer, hidden, "Hm.</think>Hi") == [("say", "Hi")]


FORMS = [
    (FORM, '{"a": 1}', "x"),
    (StructuredOutputs(kind="json_object"), '{"b": []}', "[]"),
    (StructuredOutputs(kind="regex", source=r"\d+/x"), "12/x", "a"),
    (StructuredOutputs(kind="choice", source='["yes", "n\\"o"]'), 'n"o', "maybe"),
    (StructuredOutputs(kind="grammar", source='start: "a" word\nword: /b+/'), "abb", "b"),
    (StructuredOutputs(kind="grammar", source='root ::= "a" word\nword ::= "b"+'), "abb", "b"),
]


@pytest.mark.parametrize(("form", "good", "bad"), FORMS)
def test_a_form_holds_behind_the_reasoning_or_calls_come_instead(
    tokenizer: Tokenizer, library: LLTokenizer, form: StructuredOutputs, good: str, bad: str
) -> None:
    model = model_of(tokenizer, THINKS)
    call = written("hermes", ("get_time", "{}"))
    turn = turn_of(model, structured=form)
    both = turn_of(model, structured=form, tools=TOOLS)
    for text in (good, f"<think>Hm.</think>\n\n{good}"):
        assert holds(library, tokenizer, turn, text), turn.structured
        assert holds(library, tokenizer, both, text), both.structured
    for text in (bad, f"<think>Hm.</think>\n\n{bad}", f"<think>{good}"):
        assert not holds(library, tokenizer, turn, text)
        assert not holds(library, tokenizer, both, text)
    assert holds(library, tokenizer, both, f"<think>Hm.</think>{call}")
    assert not holds(library, tokenizer, turn, call)


def test_a_budget_ends_the_reasoning(tokenizer: Tokenizer, library: LLTokenizer) -> None:
    model = model_of(tokenizer, THINKS)
    turn = turn_of(model, reasoning=ReasoningOptions(budget=3))
    for text in ("<think></think>Hi", "<think>abc</think>Hi <b>", "<think>ab</think>\n\nHi", f"<think></think>{written('hermes', ('f', '{}'))}"):
        assert holds(library, tokenizer, turn, text), (text, turn.structured)
    for text in ("<think>abcd</think>Hi", "Hi", "<think>abc"):
        assert not holds(library, tokenizer, turn, text), text
    assert holds(library, tokenizer, turn_of(model, reasoning=ReasoningOptions(budget=0)), "<think></think>Hi")
    assert turn_of(model, reasoning=ReasoningOptions(budget=8192)).structured is None  # the context ends it before
    low = turn_of(model, reasoning=ReasoningOptions(effort="low"))
    assert low.structured is not None
    assert "{0,1024}" in low.structured.source
    assert turn_of(model, reasoning=ReasoningOptions(effort="high")).structured is None


def test_the_template_may_know_the_effort(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, HERMES + "{% if reasoning_effort %}(effort {{ reasoning_effort }}){% endif %}")
    assert prompt_text(model, turn_of(model, reasoning=ReasoningOptions(effort="low"))).endswith("(effort low)")


@pytest.mark.parametrize(("options", "param"), [({"budget": 5}, "thinking_token_budget"), ({"effort": "high"}, "reasoning_effort")])
def test_reasoning_options_of_a_model_that_does_not_reason(tokenizer: Tokenizer, options: dict[str, Any], param: str) -> None:
    for model in (model_of(tokenizer, HERMES), model_of(tokenizer, THINKS, reasoning_parser="none")):
        with pytest.raises(InvalidRequest) as caught:
            turn_of(model, reasoning=ReasoningOptions(**options))
        assert caught.value.param == param


def test_parsers_that_the_operator_names(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, HERMES, tool_call_parser="llama3_json", reasoning_parser="deepseek_r1")
    turn = turn_of(model, tools=TOOLS)
    text = 'Hm.</think>{"name": "get_time", "parameters": {}}'
    assert read(tokenizer, turn, text) == [("think", "Hm."), ("call", "get_time", "{}")]
    none = turn_of(model_of(tokenizer, THINKS, reasoning_parser="none"))
    assert read(tokenizer, none, "<think>Hm.</think>Hi") == [("say", "<think>Hm.</think>Hi")]
    assert none.new_counter is None
