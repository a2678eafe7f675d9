"""Tools in chats: what reaches the prompt, what holds the answer, what comes back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from llguidance import LLMatcher

from headrace.errors import InvalidRequest
from headrace.text.grammar_checker import GrammarChecker
from headrace.text.grammar_vocabulary import GrammarVocabulary
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import World, events, refused

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOON = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def world(tokenizer: Tokenizer) -> AsyncIterator[World]:
    """A byte a token: tools take room."""
    world = World(tokenizer)
    world.service.loaded = world.with_context(65536)
    yield world
    await world.close()


def prompt_of(world: World) -> str:
    return bytes(world.generator.requests[-1].prompt_token_ids).decode()


def grammar_of(world: World) -> str | None:
    """The grammar that holds the last answer; it must be one that the library takes."""
    structured = world.generator.requests[-1].params.structured
    if structured is None:
        return None
    assert structured.kind == "grammar"
    failed, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(structured.source), None)
    assert not failed, (messages, structured.source)
    return structured.source


async def answer(world: World, text: str, **fields: Any) -> dict[str, Any]:
    """The choice that a model's text becomes; the stream of it must be the same in pieces."""
    world.generator.answer, world.generator.stops = text, True
    fields = {"tools": [WEATHER, CLOCK], **fields}
    response = await world.chat(**fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    *chunks, done = events((await world.chat(**fields, stream=True)).text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index, call-overload]
    assert deltas[0] == {"role": "assistant", "content": ""}
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (choice["message"].get(name) or "")
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["function"]["arguments"] == ""
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    whole = choice["message"].get("tool_calls", [])
    assert [call["function"] for call in calls] == [call["function"] for call in whole]
    assert all(call["type"] == "function" and call["id"] for call in (*calls, *whole))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]  # type: ignore[index, call-overload]
    return choice


async def test_a_call(world: World) -> None:
    choice = await answer(world, ROME)
    assert choice["message"]["content"] is None
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "get_weather", "arguments": '{"city": "Rome"}'}]
    assert choice["finish_reason"] == "tool_calls"
    assert grammar_of(world) is None
    prompt = prompt_of(world)
    assert prompt.startswith("[system]# Tools")
    for tool in (WEATHER, CLOCK):
        name = tool["function"]["name"]  # type: ignore[index]
        assert f'{{"type": "function", "function": {{"name": "{name}"' in prompt
    assert prompt.endswith("[user]Hi[assistant]")


async def test_words_and_two_calls(world: World) -> None:
    choice = await answer(world, f"Let me see.\n{ROME}\n{NOON}\n")
    assert choice["message"]["content"] == "Let me see."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "get_time"]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


async def test_what_is_no_call_is_content(world: World) -> None:
    for text in ("Just text.", '<tool_call>\n{"city": "Rome"}\n</tool_call>', "<tool_call> and so on"):
        choice = await answer(world, text)
        assert choice["message"]["content"] == text
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_a_call_cut_by_the_limit(world: World) -> None:
    choice = await answer(world, ROME, max_tokens=len(ROME) - 20)
    assert choice["finish_reason"] == "length"
    assert '{"city": "Rome"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_markers_are_text_without_tools(world: World) -> None:
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = await answer(world, ROME, **fields)
        assert choice["message"]["content"] == ROME
        assert choice["finish_reason"] == "stop"
        assert prompt_of(world) == "[user]Hi[assistant]"


async def test_markers_in_messages_and_echoes_are_text(world: World) -> None:
    world.generator.answer, world.generator.stops = "ok", True
    messages = [{"role": "user", "content": ROME}, {"role": "assistant", "content": ROME}]
    body = {"messages": messages, "tools": [WEATHER], "continue_final_message": True, "echo": True}
    choice = (await world.post("/v1/chat/completions", body)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": ROME + "ok", "refusal": None}
    assert prompt_of(world).endswith(f"[user]{ROME}[assistant]{ROME}")


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [ROME, NOON, f"{ROME}\n{NOON}"],
            ["Hi", "", '<tool_call>\n{"name": "x', ROME + ROME, ROME.replace("Rome", "Bonn")],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [ROME, NOON], [f"{ROME}\n{NOON}"]),
        ({"tool_choice": NAMED}, [ROME], [NOON, f"{ROME}\n{ROME}"]),
        ({"tools": [STRICT, CLOCK]}, ["Hi <b", ROME, f"Let me see.\n{ROME}\n{NOON} Good."], ["Hi <tool_call>x", ROME.replace("Rome", "Bonn")]),
        ({"tools": [STRICT], "parallel_tool_calls": False}, ["Hi", ROME], [f"{ROME}\n{ROME}"]),
    ],
)
async def test_grammars_of_forced_and_strict_calls(world: World, fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    choice = await answer(world, ROME, **fields)
    assert choice["finish_reason"] == "tool_calls"
    grammar = grammar_of(world)
    assert grammar is not None
    for text in good:
        assert accepts(world, grammar, text), (text, grammar)
    for text in bad:
        assert not accepts(world, grammar, text), (text, grammar)


def accepts(world: World, grammar: str, text: str) -> bool:
    """Whether the text is a whole answer under the grammar, token for token."""
    matcher = LLMatcher(GrammarVocabulary.of(world.tokenizer).library_tokenizer(), LLMatcher.grammar_from_lark(grammar), log_level=0)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def conversation(arguments: str, content: str | None = None) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"city":"Rome"}', '{"city": "Rome"}'),
        ("", "{}"),
        ('{"city": "Ro', '{"city": "Ro'),
        ("[]", "[]"),
        ("null", "null"),
        ("4", "4"),
        ("[" * 9999, "[["),
    ],
)
async def test_calls_and_results_in_the_history(world: World, arguments: str, written: str) -> None:
    response = await world.post("/v1/chat/completions", {"messages": conversation(arguments, "Well."), "max_tokens": 1})
    assert response.status_code == 200, response.text
    start = f'[user]Rome?[assistant]Well.\n<tool_call>\n{{"name": "get_weather", "arguments": {written}'
    assert prompt_of(world).startswith(start)
    assert prompt_of(world).endswith("}\n</tool_call>[user]<tool_response>\nsunny\n</tool_response>\nGo on.[assistant]")


async def test_an_answer_is_taken_back_as_it_is(world: World) -> None:
    choice = await answer(world, ROME)
    call = choice["message"]["tool_calls"][0]
    results = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    messages = [{"role": "user", "content": "Rome?"}, choice["message"], results]
    response = await world.post("/v1/chat/completions", {"messages": messages, "tools": [WEATHER], "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert f"[assistant]{ROME}[user]" in prompt_of(world)


async def test_tokenize_shows_the_tools(world: World) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
    ids = (await world.post("/tokenize", body)).json()["tokens"]
    await world.chat(tools=[WEATHER], max_tokens=1)
    assert tuple(ids) == world.generator.requests[-1].prompt_token_ids


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [tool()] * 600}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [tool(), {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{**tool(), "kind": 1}]}, "tools[0].kind"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool(name="")]}, "tools[0].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(name=5)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(weight=1)]}, "tools[0].function.weight"),
        ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 5}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [tool()], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        *(({"tools": tools, "tool_choice": choice}, "tool_choice") for tools in (None, []) for choice in ("auto", "required", NAMED)),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
async def test_bad_tools_are_refused_by_name(world: World, fields: dict[str, Any], param: str) -> None:
    refused(await world.chat(**fields), param=param)
    assert not world.generator.requests


async def test_a_schema_that_no_grammar_can_hold_names_its_tool(world: World) -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(80):
        nested = {"type": "array", "items": nested}
    tools = [CLOCK, tool(parameters={"type": "object", "properties": {"a": nested}})]
    assert (await world.chat(tools=tools, max_tokens=1)).status_code == 200
    refused(await world.chat(tools=tools, tool_choice="required"), param="tools[1].function.parameters")


@pytest.mark.parametrize(("depth", "param"), [(150, "tools"), (5000, None)])  # the second is no body that is read at all
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_schemas_without_end_are_refused(world: World, depth: int, param: str | None, choice: str) -> None:
    schema = '{"items": ' * depth + "{}" + "}" * depth
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]'
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, "tool_choice": "{choice}", "tools": {tools}}}'
    refused(await world.http.post("/v1/chat/completions", content=body), param=param)


async def test_a_keyword_that_no_grammar_can_hold_names_its_tool(world: World) -> None:
    tools = [CLOCK, WEATHER, tool(parameters={"properties": {"a": {"not": {"type": "string"}}}})]
    checker = GrammarChecker(world.tokenizer)
    try:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            assert (await world.chat(tools=tools, tool_choice=choice, max_tokens=1)).status_code == 200
            structured = world.generator.requests[-1].params.structured
            assert structured is not None
            for _ in range(2):  # the second time the verdict is known
                with pytest.raises(InvalidRequest, match=r"^tools\[2\].function.parameters cannot be used: the JSON schema uses not") as caught:
                    checker.check_now(structured)
                assert caught.value.param == "tools[2].function.parameters"
    finally:
        checker.close()


async def test_every_choice_has_calls_of_its_own(world: World) -> None:
    world.generator.answer, world.generator.stops = ROME, True
    choices = (await world.chat(tools=[WEATHER], n=3)).json()["choices"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 3
    assert all(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"} for choice in choices)


async def test_logprobs_and_ids_cover_the_calls(world: World) -> None:
    world.generator.answer, world.generator.stops = f"See.\n{ROME}", True
    fields = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    choice = (await world.chat(**fields)).json()["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == f"See.\n{ROME}"
    chunks = events((await world.chat(**fields, stream=True)).text)[:-1]
    pieces = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index, call-overload]
    assert [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert [token_id for piece in pieces for token_id in piece.get("token_ids", ())] == choice["token_ids"]
