"""Structured output through the whole engine: a tiny random model whose tokens are bytes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.generation import GenerationRequest, Generator
from headrace.engine.outputs import RequestOutput
from headrace.errors import InvalidRequest
from headrace.sampling_params import SamplingParams, StructuredOutputs
from headrace.text.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import END, write_byte_tokenizer
from tests.engine.fake_engine import at_rest, engine, fake_config, until
from tests.runner.tiny_model import save_tiny_llama

PHONE = StructuredOutputs(kind="regex", source="[0-9]{3}-[a-f]{4}")
LETTERS = StructuredOutputs(kind="regex", source="[ab]*")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its table has more rows than the tokenizer has tokens."""
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory, vocab_size=320, eos_token_id=END, max_position_embeddings=512)
    return write_byte_tokenizer(directory)


@pytest.fixture
async def llm(model: Path) -> AsyncIterator[AsyncLLM]:
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "max_num_seqs": 4, "block_size": 4, "num_gpu_blocks_override": 130}
    async with AsyncLLM(model, **options) as llm:
        yield llm


async def answer(llm: AsyncLLM, **params: Any) -> RequestOutput:
    options = SamplingParams(**{"max_tokens": 40, "temperature": 1.0, "seed": 3} | params)
    return [output async for output in llm.generate("Hello", options)][-1]


async def test_forms_of_many_requests_at_once(llm: AsyncLLM) -> None:
    """More than can run at once, with choices, seeds, stop strings, limits, and free ones among them."""
    person = StructuredOutputs(kind="json_schema", source=json.dumps(PERSON))
    alone = await answer(llm, temperature=0.0, max_tokens=20, ignore_eos=True)
    phones, people, stopped, cut, free, longest, word = await asyncio.gather(
        answer(llm, structured=PHONE, n=6, logprobs=2),
        answer(llm, structured=person, n=3, temperature=1.5),
        answer(llm, structured=PHONE, stop=["-"], temperature=0.0),
        answer(llm, structured=person, max_tokens=3),
        answer(llm, temperature=0.0, max_tokens=20, ignore_eos=True),
        answer(llm, structured=LETTERS, ignore_eos=True, max_tokens=30),
        answer(llm, structured=StructuredOutputs(kind="choice", source='["x"]'), min_tokens=20),
    )
    texts = [choice.text for choice in phones.outputs]
    assert all(re.fullmatch(PHONE.source, text) for text in texts)
    assert len(set(texts)) > 1
    assert {choice.finish_reason for choice in phones.outputs} == {"stop"}
    assert all(len(choice.logprobs or ()) == len(choice.token_ids) == 8 for choice in phones.outputs)
    for choice in people.outputs:
        value = json.loads(choice.text)
        assert set(value) == {"name", "ok"}
        assert len(value["name"]) <= 6
    assert re.fullmatch("[0-9]{3}", stopped.outputs[0].text)
    assert stopped.outputs[0].stop_reason == "-"
    assert (cut.outputs[0].finish_reason, cut.outputs[0].text[0]) == ("length", "{")
    assert free.outputs[0].token_ids == alone.outputs[0].token_ids
    assert re.fullmatch("[ab]{30}", longest.outputs[0].text)  # the end is ignored as long as something else can come
    assert (word.outputs[0].text, word.outputs[0].finish_reason) == ("x", "stop")
    again = await answer(llm, structured=PHONE, n=6)
    assert [choice.text for choice in again.outputs] == texts
    await at_rest(llm.client)


async def test_refusals_and_aborts_leave_nothing_behind(llm: AsyncLLM) -> None:
    good = asyncio.create_task(answer(llm, structured=LETTERS, max_tokens=30, ignore_eos=True))
    with pytest.raises(InvalidRequest, match="unclosed") as caught:
        await answer(llm, structured=StructuredOutputs(kind="regex", source="[a", param="guided_regex"))
    assert caught.value.param == "guided_regex"
    gone = asyncio.create_task(answer(llm, structured=PHONE))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    async for _ in llm.generate("Hello", SamplingParams(structured=LETTERS, max_tokens=300, ignore_eos=True)):
        break
    assert len((await good).outputs[0].text) == 30
    await at_rest(llm.client)


async def test_a_new_engine_is_told_the_vocabulary_again(tokenizer: Tokenizer) -> None:
    """On the fake runner, which follows no grammar, but before which every grammar is compiled."""
    ids = (f"r{number}" for number in range(1000))

    async def finish(generator: Generator) -> str | None:
        request = GenerationRequest(request_id=next(ids), prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=2, structured=PHONE))
        return [delta.finish_reason async for delta in generator.generate(request)][-1]

    async with engine(fake_config()) as client:
        generator = Generator(client, tokenizer)
        assert await finish(generator) == "length"
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: client.state == "ready" and client.pid not in (None, pid), 60)
        assert await finish(generator) == "length"
        generator.close()
