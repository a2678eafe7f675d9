"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import math
import struct

import pytest

from headrace.errors import EngineUnavailable, QueueFull
from tests.engine.fake_engine import until
from tests.server.fakes import CONTEXT, World, refused, state_of


def unit(values: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return pytest.approx([value / length for value in values], abs=1e-6)


async def embed(world: World, **body: object) -> dict[str, object]:
    response = await world.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer


async def test_one_text(world: World):
    answer = await embed(world, input="Hi there", model="tiny", user="me")
    assert set(answer) == {"object", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert answer["data"] == [{"object": "embedding", "index": 0, "embedding": unit(state_of(b"Hi there"))}]
    (request,) = world.generator.embedding_requests
    assert (request.pooling, request.priority, request.deadline, request.cache_salt) == ("last", 0, None, None)


async def test_every_form_of_input_gives_the_same_vectors(world: World):
    forms = ["ab", list(b"ab"), ["ab"], [list(b"ab")]]
    vectors = [(await embed(world, input=form))["data"] for form in forms]
    assert vectors[0] == vectors[1] == vectors[2] == vectors[3]


async def test_many_texts_are_in_order_and_never_too_many_at_once(world: World):
    texts = [f"text {i}" for i in range(300)]
    world.generator.delay = {6: 0.01}
    data = (await embed(world, input=texts, priority=3, cache_salt="s", deadline_ms=60_000))["data"]
    assert [item["index"] for item in data] == list(range(300))
    assert data[299]["embedding"] == unit(state_of(b"text 299"))
    assert world.generator.most_open == 64
    request = world.generator.embedding_requests[-1]
    assert (request.priority, request.cache_salt, request.deadline is not None) == (3, "s", True)


async def test_base64_is_little_endian_float32(world: World):
    plain = (await embed(world, input="abc", encoding_format="float"))["data"][0]["embedding"]
    packed = base64.b64decode((await embed(world, input="abc", encoding_format="base64"))["data"][0]["embedding"])
    assert list(struct.unpack("<8f", packed)) == plain


async def test_dimensions_keeps_the_leading_numbers_at_length_one(world: World):
    vector = (await embed(world, input="abc", dimensions=3))["data"][0]["embedding"]
    assert vector == unit(state_of(b"abc")[:3])
    for wrong in (0, -1, 9):
        refused(await world.post("/v1/embeddings", {"input": "abc", "dimensions": wrong}), param="dimensions")


async def test_truncation_keeps_the_last_tokens(world: World):
    answer = await embed(world, input="abcdef", truncate_prompt_tokens=2)
    assert answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert answer["data"] == (await embed(world, input="ef"))["data"]
    assert (await embed(world, input="x" * 9000, truncate_prompt_tokens=-1))["usage"]["prompt_tokens"] == CONTEXT
    for wrong in (0, -2, CONTEXT + 1):
        refused(await world.post("/v1/embeddings", {"input": "abc", "truncate_prompt_tokens": wrong}), param="truncate_prompt_tokens")


async def test_the_whole_context_may_be_used(world: World):
    assert (await embed(world, input="x" * CONTEXT))["usage"]["prompt_tokens"] == CONTEXT
    for too_long in ("x" * (CONTEXT + 1), "x" * 100_000):
        error = refused(await world.post("/v1/embeddings", {"input": ["ok", too_long]}), param="input", code="context_length_exceeded")
        assert str(CONTEXT) in str(error["message"])


@pytest.mark.parametrize("world", [{"pooling": "mean"}], indirect=True)
async def test_the_operator_chooses_the_pooling(world: World):
    await embed(world, input="ab")
    assert world.generator.embedding_requests[0].pooling == "mean"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": 5}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": "3"}, "dimensions"),
        ({"x_unknown": 1}, "x_unknown"),
        ({"stream": True}, "stream"),
    ],
)
async def test_what_is_wrong_is_named(world: World, fields: dict[str, object], param: str):
    refused(await world.post("/v1/embeddings", {"input": "x", **fields}), param=param)
    assert not world.generator.embedding_requests


async def test_an_error_of_the_engine_ends_the_request_and_its_other_inputs(world: World):
    world.generator.error = QueueFull("full", retry_after=7)
    response = await world.post("/v1/embeddings", {"input": ["a", "b"]})
    refused(response, 429, code="queue_full")
    assert response.headers["retry-after"] == "7"
    world.generator.error = EngineUnavailable("dead")
    refused(await world.post("/v1/embeddings", {"input": "a"}), 503)
    assert world.generator.open == 0


async def test_a_client_that_hangs_up_stops_the_work(world: World):
    world.generator.delay = {1: 60.0}
    task = asyncio.create_task(world.post("/v1/embeddings", {"input": "a"}))
    await until(lambda: world.generator.open == 1)
    assert world.service.admission.active == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (world.generator.open, world.service.admission.active, world.service.bodies.used) == (0, 0, 0)
