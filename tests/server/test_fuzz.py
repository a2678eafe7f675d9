"""Whatever a client sends, it gets an answer or a refusal in OpenAI's shape."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.server.messages.schema import MessageBody
from headrace.server.responses.schema import ResponseBody
from headrace.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from headrace.server.unsupported import UNSUPPORTED
from headrace.text.tokenizer import Tokenizer
from tests.patience import LIMIT_S
from tests.server.fakes import World, refused

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessageBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=8)
small = st.integers(-2, 30) | st.sampled_from([0.0, 0.5, 1.0, True, None, "text", [], {}, [1, 2], ["a"], {"5": 1}])
good_fields = {
    "prompt": st.sampled_from(["hi", [1, 2], ["a", "b"], [[1], [2]]]),
    "messages": st.sampled_from([[{"role": "user", "content": "x"}], [{"role": "assistant", "content": "x"}]]),
    "input": st.sampled_from(["x", [{"role": "user", "content": "x"}], [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]]),
    "tokens": st.sampled_from([[], [1, 2]]),
}


def bodies(body_type: type) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly right bodies with some fields of any value."""
    names = sorted({*body_type.model_fields, *UNSUPPORTED})  # type: ignore[attr-defined]
    base = st.fixed_dictionaries({name: strategy for name, strategy in good_fields.items() if name in names})
    odd = st.dictionaries(st.sampled_from(names), small | values, max_size=3)
    stray = st.dictionaries(st.text(max_size=5), values, max_size=1)
    return st.tuples(base, odd, stray).map(lambda parts: {**parts[0], **parts[2], **parts[1]})


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code == 200:
        return
    if response.json().get("type") == "error":
        assert response.json()["error"]["message"]
    else:
        refused(response, response.status_code)


class Target:
    """One server for all examples of a test; each must leave it as it was."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._runner = asyncio.Runner()
        self._world = World(tokenizer)

    def send(self, path: str, content: bytes) -> None:
        world = self._world
        check(self._runner.run(self._post(path, content)))
        assert world.generator.open == 0
        assert world.service.admission.active == 0
        assert world.service.bodies.used == 0
        assert world.service.metrics.faults == 0

    async def _post(self, path: str, content: bytes) -> httpx.Response:
        response = await self._world.http.post(path, content=content)
        await asyncio.wait_for(self._world.service.admission.idle.wait(), LIMIT_S)  # responses that are made in the background
        return response

    def close(self) -> None:
        self._runner.run(self._world.close())
        self._runner.close()


@pytest.fixture
def target(tokenizer: Tokenizer) -> Iterator[Target]:
    target = Target(tokenizer)
    yield target
    target.close()


fuzz = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("path", BODIES)
@fuzz
@given(data=st.data())
def test_any_json(target: Target, path: str, data: st.DataObject):
    body = data.draw(bodies(BODIES[path]))
    target.send(path, json.dumps(body).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@fuzz
@given(content=st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u d8ntrue019eE+-.', max_size=40).map(str.encode))
def test_any_bytes(target: Target, path: str, content: bytes):
    target.send(path, content)


@pytest.mark.parametrize(
    "field", [r'"prompt": "\ud83d"', r'"prompt": "ok", "user": "\ude00x"', r'"prompt": "ok", "stop": "\ud83d\ud83d"', r'"prompt": "ok", "\ud800": 1']
)
async def test_half_a_surrogate_pair(world: World, field: str):
    check(await world.http.post("/v1/completions", content=b"{%s}" % field.encode()))


async def test_odd_characters_are_text(world: World):
    for text in ("a\x00b\ufeffc\u202ed", "\u2028\x85", "\ufffd\ufffe", "😀"):
        body = json.dumps({"prompt": text, "max_tokens": 1, "echo": True})
        response = await world.http.post("/v1/completions", content=body)
        assert response.json()["choices"][0]["text"] == text + "H"
