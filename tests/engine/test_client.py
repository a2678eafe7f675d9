"""The client and a healthy engine process."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from headrace.engine.client import EngineClient
from headrace.errors import ConfigError, ContextLengthExceeded, EngineUnavailable, InvalidRequest, QueueFull, StartError
from tests.engine.fake_engine import add, at_rest, collect, engine, fake_config, until
from tests.patience import LIMIT_S
from tests.patience import until as wait_until

SLOW = {"step_seconds": 0.02}


async def test_a_request_gets_its_tokens():
    client = EngineClient(fake_config(max_model_len=64))
    assert client.state == "starting"
    with pytest.raises(EngineUnavailable, match="starting"):
        client.submit(add())
    info = await client.start()
    try:
        assert (client.state, info.max_model_len, info.vocab_size) == ("ready", 64, 259)
        output = await collect(client, add(max_tokens=10))
        assert (len(output.token_ids), output.finish_reason, output.cached_tokens) == (10, "length", 0)
        await at_rest(client)
        assert client.stats.generation_tokens_total == 10
    finally:
        await client.close()
    assert client.state == "dead"
    with pytest.raises(EngineUnavailable):
        client.submit(add())


async def test_the_same_tokens_with_and_without_async_scheduling():
    """Beside others, in chunks, with too few blocks for all: the fake runner's answers depend on every token before them."""
    answers = []
    for async_scheduling in (True, False):
        config = fake_config(
            async_scheduling=async_scheduling, num_gpu_blocks_override=20, max_model_len=96, max_num_seqs=6, max_num_batched_tokens=32, block_size=8
        )
        async with engine(config) as client:
            requests = [add(tuple(range(i, 2 * i + 3)), max_tokens=i % 13 + 1, ignore_eos=i % 2 == 0, seed=i, temperature=i % 3) for i in range(30)]
            outputs = await asyncio.gather(*(collect(client, request) for request in requests))
            answers.append([(output.token_ids, output.finish_reason) for output in outputs])
            await at_rest(client)
    assert answers[0] == answers[1]


async def test_a_question_about_the_cache_is_answered_beside_running_requests():
    async with engine(fake_config(SLOW)) as client:
        stream = client.submit(add(tuple(range(100)), max_tokens=300))
        await anext(stream)
        found = await asyncio.gather(*(client.explain(tuple(range(end))) for end in (100, 40, 5)))
        assert [(item.num_tokens, item.cached_blocks) for item in found] == [(100, 6), (40, 2), (5, 0)]
        assert [item.reason for item in found] == ["cached", "cached", "below_one_block"]
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await client.explain((1,), cache_salt="\ud800")
        os.kill(client.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(client.explain((1, 2)))
        await asyncio.sleep(0.05)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await waiting
        with pytest.raises(EngineUnavailable):
            await anext(stream)
        with pytest.raises(EngineUnavailable):
            await client.explain((1, 2))


async def test_closing_a_stream_frees_everything():
    async with engine(fake_config(SLOW)) as client:
        stream = client.submit(add(tuple(range(100)), max_tokens=300))
        await anext(stream)
        await until(lambda: client.stats.num_running == 1)
        await stream.aclose()
        await at_rest(client)
        assert client.stats.generation_tokens_total < 300


async def test_an_id_may_run_once_at_a_time():
    async with engine(fake_config(SLOW)) as client:
        stream = client.submit(add(request_id="same", max_tokens=300))
        with pytest.raises(InvalidRequest, match="same"):
            client.submit(add(request_id="same"))
        await stream.aclose()
        await at_rest(client)
        assert (await collect(client, add(request_id="same"))).finish_reason == "length"


async def test_what_cannot_cross_is_refused_before_it_is_sent():
    async with engine(fake_config()) as client:
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            client.submit(add(request_id="\ud800"))
        assert (await collect(client, add())).finish_reason == "length"


async def test_refusals_have_their_own_errors(tmp_path):
    held = tmp_path / "held"
    async with engine(fake_config({"held_by": str(held)}, max_num_seqs=1, max_num_queued_reqs=1, max_model_len=64)) as client:
        with pytest.raises(ContextLengthExceeded, match="64"):
            await collect(client, add((1,) * 64))
        held.touch()
        running = client.submit(add(max_tokens=60))
        await until(lambda: client.stats.num_running == 1)
        others = [asyncio.create_task(collect(client, add(max_tokens=1))) for _ in range(4)]
        await until(lambda: sum(task.done() for task in others) == 3)
        held.unlink()
        results = await asyncio.gather(*others, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFull)]
        assert len(refused) == 3
        assert all(error.retry_after >= 1 for error in refused)
        await running.aclose()
        await at_rest(client)


async def test_draining_lets_open_requests_end_and_takes_no_more():
    async with engine(fake_config(SLOW)) as client:
        open_one = asyncio.create_task(collect(client, add(max_tokens=20)))
        await until(lambda: client.num_open == 1)
        assert not await client.drain(0.0)
        assert client.state == "draining"
        with pytest.raises(EngineUnavailable, match="shutting down"):
            client.submit(add())
        assert await client.drain(LIMIT_S)
        assert (await open_one).finish_reason == "length"


async def test_closing_fails_what_is_open_at_once():
    async with engine(fake_config(SLOW)) as client:
        open_one = asyncio.create_task(collect(client, add(max_tokens=400)))
        await until(lambda: client.num_open == 1)
        await client.close()
        with pytest.raises(EngineUnavailable):
            await open_one


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (fake_config({"fail_start": "The disk is on fire; buy another."}), StartError, "^The disk is on fire; buy another.$"),
        (fake_config({"no_such_setting": 1}), ConfigError, "no_such_setting"),
        (fake_config(max_model_len=1000, num_gpu_blocks_override=10), ConfigError, "holds 160 tokens.*--max-model-len is 1000"),
    ],
)
async def test_start_errors_keep_their_kind_and_text(config, error, message, capfd):
    client = EngineClient(config)
    with pytest.raises(error, match=message) as caught:
        await client.start()
    assert type(caught.value) is error
    assert client.state == "dead"
    assert client.pid is None
    assert "Traceback" not in capfd.readouterr().err


async def test_a_child_that_says_nothing():
    """Broken beyond words: the process ends before it can tell why."""
    client = EngineClient(fake_config({"start_seconds": 250}))
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(StartError, match="exit code -9"):
        await starting


async def test_a_start_that_is_given_up_leaves_no_process():
    client = EngineClient(fake_config({"start_seconds": 250}))
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    pid = client.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_closing_while_the_model_loads():
    client = EngineClient(fake_config({"start_seconds": 250}))
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    await asyncio.wait_for(client.close(), LIMIT_S)
    with pytest.raises(StartError, match="exit code -9"):
        await starting


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_for_a_graceful_end_are_the_parents_to_act_on(number):
    async with engine(fake_config(SLOW)) as client:
        stream = client.submit(add(max_tokens=10))
        await anext(stream)
        os.kill(client.pid, number)
        assert [output async for output in stream][-1].finish_reason == "length"


PARENT = """
import asyncio, sys
from tests.engine.fake_engine import add, engine, fake_config

async def main():
    async with engine(fake_config({"step_seconds": 0.05})) as client:
        client.submit(add(max_tokens=400))
        print(client.pid, flush=True)
        await asyncio.sleep(250)

asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    wait_until(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
