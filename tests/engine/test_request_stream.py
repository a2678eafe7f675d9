"""The iterator of one request's outputs."""

import asyncio

import pytest

from headrace.core.messages import TokenLogprobs, TokenOutput
from headrace.engine.request_stream import RequestStream
from headrace.errors import RequestFailed


def output(*ids: int, **fields) -> TokenOutput:
    return TokenOutput(request_id="r", token_ids=ids, **fields)


def score(token: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token, logprob=-1.0, rank=1)


def make() -> tuple[RequestStream, list[str]]:
    aborts: list[str] = []
    return RequestStream(lambda: aborts.append("abort")), aborts


async def test_outputs_nobody_takes_are_merged():
    stream, aborts = make()
    stream.push(output(1, cached_tokens=4, prompt_logprobs=(score(9),), logprobs=(score(1),)))
    stream.push(output(2, logprobs=(score(2),), num_preemptions=1))
    stream.push(output(3, logprobs=(score(3),), finish_reason="length"))
    merged = output(
        1,
        2,
        3,
        cached_tokens=4,
        prompt_logprobs=(score(9),),
        logprobs=(score(1), score(2), score(3)),
        finish_reason="length",
    )
    assert [each async for each in stream] == [merged]
    assert not aborts


async def test_outputs_come_as_they_are_pushed():
    stream, aborts = make()
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.push(output(1))
    assert (await waiting).token_ids == (1,)
    stream.push(output(2, finish_reason="stop"))
    assert (await anext(stream)).token_ids == (2,)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    assert not aborts


async def test_a_failure_comes_behind_the_outputs_before_it_and_only_once():
    stream, aborts = make()
    stream.push(output(1))
    stream.fail(RequestFailed("broken"))
    assert (await anext(stream)).token_ids == (1,)
    with pytest.raises(RequestFailed, match="broken"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert not aborts


async def test_closing_early_aborts_once():
    stream, aborts = make()
    stream.push(output(1))
    await stream.aclose()
    await stream.aclose()
    assert aborts == ["abort"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_cancelled_consumer_aborts():
    stream, aborts = make()
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert aborts == ["abort"]
