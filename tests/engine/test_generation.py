"""Text streams on a real engine process with the fake runner."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from headrace.core.messages import TokenLogprobs
from headrace.engine.choice import Choice, ChoiceDelta
from headrace.engine.generation import GenerationRequest, Generator
from headrace.errors import ContextLengthExceeded, EngineUnavailable, InvalidRequest
from headrace.sampling_params import SamplingParams
from tests.engine.fake_engine import at_rest, engine, fake_config, until

LETTERS = {"low": 97, "high": 123, "eos_every": 0}  # answers are made of a .. z


def request(prompt: str = "hello", *, request_id: str = "r", **params) -> GenerationRequest:
    params = {"max_tokens": 12, "temperature": 0.0} | params
    return GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt.encode()), params=SamplingParams(**params))


async def answer(generator: Generator, asked: GenerationRequest) -> list[ChoiceDelta]:
    """Each choice's deltas joined into one."""
    deltas: list[list[ChoiceDelta]] = [[] for _ in range(asked.params.n)]
    async with aclosing(generator.generate(asked)) as stream:
        async for delta in stream:
            deltas[delta.index].append(delta)
    joined = []
    for index, own in enumerate(deltas):
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(own) - 1) + [True]
        logprobs: list[TokenLogprobs] = [entry for delta in own for entry in delta.logprobs or ()]
        joined.append(
            replace(
                own[-1],
                index=index,
                text="".join(delta.text for delta in own),
                token_ids=tuple(token for delta in own for token in delta.token_ids),
                logprobs=tuple(logprobs) if logprobs else None,
                prompt_logprobs=own[0].prompt_logprobs,
                cached_tokens=own[0].cached_tokens,
            )
        )
    return joined


async def test_text_tokens_and_logprobs_of_one_answer(tokenizer):
    async with engine(fake_config(LETTERS)) as client:
        generator = Generator(client, tokenizer)
        (plain,) = await answer(generator, request(logprobs=2, prompt_logprobs=1))
        assert len(plain.token_ids) == len(plain.logprobs) == 12
        assert plain.text == tokenizer.decode(plain.token_ids)
        assert [entry.token_id for entry in plain.logprobs] == list(plain.token_ids)
        assert [entry.token_id for entry in plain.prompt_logprobs] == list(b"ello")
        assert (plain.finish_reason, plain.cached_tokens) == ("length", 0)
        await at_rest(client)


async def test_a_stop_string_ends_the_engines_part_too(tokenizer):
    async with engine(fake_config(LETTERS | {"step_seconds": 0.02})) as client:
        generator = Generator(client, tokenizer)
        (whole,) = await answer(generator, request(max_tokens=40))
        stop = whole.text[5:9]
        (cut,) = await answer(generator, request(max_tokens=400, stop=(stop,), logprobs=0))
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:5], "stop", stop)
        assert cut.token_ids == whole.token_ids[:9]
        assert len(cut.logprobs) == 9
        await at_rest(client)
        assert client.stats.generation_tokens_total < 40 + 400


async def test_n_choices_each_end_once_and_differ(tokenizer):
    async with engine(fake_config(LETTERS)) as client:
        generator = Generator(client, tokenizer)
        asked = request("x" * 50, n=4, seed=3, temperature=1.0, logprobs=0, prompt_logprobs=0)
        choices = await answer(generator, asked)
        assert len({choice.text for choice in choices}) == 4
        assert {len(choice.token_ids) for choice in choices} == {12}
        assert [choice.prompt_logprobs is not None for choice in choices] == [True, False, False, False]
        assert [choice.text for choice in await answer(generator, asked)] == [choice.text for choice in choices]
        await at_rest(client)


async def test_leaving_early_aborts_every_choice(tokenizer):
    async with engine(fake_config(LETTERS | {"step_seconds": 0.01})) as client:
        generator = Generator(client, tokenizer)
        async with aclosing(generator.generate(request(n=3, max_tokens=400))) as stream:
            await anext(stream)
            await until(lambda: client.stats.num_running == 3)
        await at_rest(client)

        consumer = asyncio.create_task(answer(generator, request(n=3, max_tokens=400)))
        await until(lambda: client.stats.num_running == 3)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await at_rest(client)


async def test_a_slow_consumer_gets_merged_deltas_and_holds_up_nobody(tokenizer):
    async with engine(fake_config(LETTERS)) as client:
        generator = Generator(client, tokenizer)
        async with aclosing(generator.generate(request(max_tokens=200))) as stream:
            first = await anext(stream)
            await until(lambda: client.num_open == 0)
            (other,) = await answer(generator, request("other", request_id="s"))
            assert other.finish_reason == "length"
            rest = [delta async for delta in stream]
        assert len(rest) == 1
        assert len(first.token_ids) + len(rest[0].token_ids) == 200
        assert tokenizer.decode(first.token_ids + rest[0].token_ids) == first.text + rest[0].text


async def test_a_stop_string_is_found_though_nobody_reads(tokenizer):
    """An unread stream does not keep the engine busy past its end."""
    async with engine(fake_config(LETTERS | {"step_seconds": 0.02})) as client:
        generator = Generator(client, tokenizer)
        (whole,) = await answer(generator, request())
        async with aclosing(generator.generate(request(max_tokens=400, stop=(whole.text[6:9],)))) as stream:
            await anext(stream)
            await at_rest(client)
            assert [delta async for delta in stream][-1].finish_reason == "stop"


async def test_no_tokens_wanted(tokenizer):
    async with engine(fake_config(LETTERS)) as client:
        generator = Generator(client, tokenizer)
        choices = await answer(generator, request(max_tokens=0, n=2))
        assert [(choice.text, choice.token_ids, choice.finish_reason) for choice in choices] == [("", (), "length")] * 2
        (scored,) = await answer(generator, request(max_tokens=0, prompt_logprobs=1))
        assert (scored.text, scored.token_ids, scored.finish_reason) == ("", (), "length")
        assert len(scored.prompt_logprobs) == 4
        await at_rest(client)


async def test_the_answer_ends_where_the_context_does(tokenizer):
    async with engine(fake_config(LETTERS, max_model_len=32)) as client:
        generator = Generator(client, tokenizer)
        for max_tokens in (None, 10**6):
            (choice,) = await answer(generator, request("x" * 22, max_tokens=max_tokens))
            assert (len(choice.token_ids), choice.finish_reason) == (10, "length")
        with pytest.raises(ContextLengthExceeded, match=r"32 tokens.*holds 32"):
            await answer(generator, request("x" * 32))
        with pytest.raises(InvalidRequest, match="259"):
            await answer(generator, GenerationRequest(request_id="r", prompt_token_ids=(259,), params=SamplingParams()))


async def test_bad_words_reach_the_runner_as_ids(tokenizer, monkeypatch):
    async with engine(fake_config(LETTERS)) as client:
        sent = []
        opened = client.open
        monkeypatch.setattr(client, "open", lambda add, *rest: (sent.append(add), opened(add, *rest)))
        await answer(Generator(client, tokenizer), request(bad_words=("no",)))
        assert sent[0].params.bad_words_ids == (tuple(b"no"), tuple(b" no"))


async def test_the_end_of_the_engine_is_an_error_behind_the_text_so_far(tokenizer):
    async with engine(fake_config(LETTERS | {"step_seconds": 0.01, "exit_at_step": 8})) as client:
        texts = []

        async def consume() -> None:
            async for delta in Generator(client, tokenizer).generate(request(n=2, max_tokens=300)):
                texts.append(delta.text)

        with pytest.raises(EngineUnavailable):
            await consume()
        assert "".join(texts)
        assert client.num_open == 0


async def test_a_fault_in_the_text_code_ends_its_own_request(tokenizer, monkeypatch):
    async with engine(fake_config(LETTERS)) as client:
        generator = Generator(client, tokenizer)
        push = Choice.push
        monkeypatch.setattr(Choice, "push", lambda self, output: push(self, output) if output.request_id != "bad" else 1 / 0)
        good = asyncio.create_task(answer(generator, request(request_id="good")))
        with pytest.raises(ZeroDivisionError):
            await answer(generator, request(request_id="bad", max_tokens=400))
        assert (await good)[0].finish_reason == "length"
        await at_rest(client)


async def test_without_an_engine(tokenizer):
    async with engine(fake_config(LETTERS)) as client:
        pass
    with pytest.raises(EngineUnavailable):
        await answer(Generator(client, tokenizer), request())
