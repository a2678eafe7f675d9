"""Engines that fail: every open stream ends with an error, the engine comes back, and new requests are answered."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from headrace.engine.client import FIRST_BACKOFF_S, EngineClient
from headrace.engine.wire import Heartbeat
from headrace.errors import EngineUnavailable, RequestFailed
from tests.engine.fake_engine import add, at_rest, collect, engine, fake_config, until
from tests.patience import LIMIT_S

SLOW = {"step_seconds": 0.01}


@contextmanager
def impatient(client: EngineClient) -> Iterator[None]:
    """Takes a step for stuck after half a second, which is too little for a machine that stands still now and then."""
    config = client.config
    client.config = replace(config, step_timeout_s=0.5)
    yield
    client.config = config


async def fails(client: EngineClient, error: type[Exception], *, match: str | None = None, flowing: asyncio.Event | None = None) -> None:
    """Opens four long streams; each gets a token at least and then the error. `flowing` is set when each has a token."""
    count = 0

    async def one() -> None:
        nonlocal count
        stream = client.submit(add(max_tokens=400))
        assert (await anext(stream)).token_ids
        count += 1
        if count == 4 and flowing is not None:
            flowing.set()
        with pytest.raises(error, match=match):
            async for _ in stream:
                pass

    await asyncio.wait_for(asyncio.gather(*(one() for _ in range(4))), LIMIT_S)


async def comes_back(client: EngineClient, old_pid: int | None) -> None:
    await until(lambda: client.state == "ready")
    assert client.pid != old_pid
    assert (await collect(client, add())).finish_reason == "length"
    await at_rest(client)


@pytest.mark.parametrize("async_scheduling", [True, False])
async def test_a_step_raises(async_scheduling):
    """The requests of the step fail, the engine goes on in the same process."""
    async with engine(fake_config(SLOW | {"raise_at_step": 12}, async_scheduling=async_scheduling)) as client:
        pid = client.pid
        await fails(client, RequestFailed, match="its script says so")
        outputs = await asyncio.gather(*(collect(client, add((i,) * 40)) for i in range(5)))
        assert {output.finish_reason for output in outputs} == {"length"}
        await at_rest(client)
        assert (client.pid, client.restarts_total) == (pid, 0)


async def test_failed_steps_poison_no_prefix():
    """A prompt whose step raised is computed again, not found in the prefix cache. The fake runner checks each position it attends."""
    prompt = tuple(range(64))
    async with engine(fake_config({"raise_at_step": 1})) as client:
        with pytest.raises(RequestFailed):
            await collect(client, add(prompt))
        first = await collect(client, add(prompt))
        again = await collect(client, add(prompt))
        assert first.cached_tokens == 0
        assert again.cached_tokens > 0
        assert first.token_ids == again.token_ids
        await at_rest(client)


async def test_steps_that_keep_raising_bring_a_new_process(tmp_path):
    async with engine(fake_config(SLOW | {"raise_at_step": list(range(5, 100)), "once": str(tmp_path / "never")})) as client:
        (tmp_path / "never").touch()  # only now: the steps below must work in the second process
        pid = client.pid
        assert (await collect(client, add())).finish_reason == "length"
        assert client.pid == pid
    async with engine(fake_config(SLOW | {"raise_at_step": [1, 2, 3]})) as client:
        pid = client.pid
        for _ in range(3):
            with pytest.raises(RequestFailed):
                await collect(client, add())
        await until(lambda: client.pid not in (pid, None))
        assert client.restarts_total == 1


async def test_the_process_ends_without_a_word(tmp_path):
    config = fake_config(SLOW | {"exit_at_step": 10, "once": str(tmp_path / "once")})
    async with engine(config) as client:
        pid = client.pid
        await fails(client, EngineUnavailable, match="died")
        await comes_back(client, pid)


async def test_the_process_is_killed():
    async with engine(fake_config(SLOW)) as client:
        for _ in range(2):
            pid, before = client.pid, client.stats.generation_tokens_total
            flowing = asyncio.Event()
            failing = asyncio.create_task(fails(client, EngineUnavailable, flowing=flowing))
            await flowing.wait()
            await until(lambda before=before: client.stats.generation_tokens_total > before)
            os.kill(pid, signal.SIGKILL)
            await failing
            assert client.stats.num_running == 0
            with pytest.raises(EngineUnavailable, match="restarted"):
                client.submit(add())
            total = client.stats.generation_tokens_total
            assert total > before
            await comes_back(client, pid)
            assert client.stats.generation_tokens_total == total + 8  # totals go on over restarts
        assert client.restarts_total == 2


async def test_a_stuck_step_is_seen_and_ended(tmp_path):
    async with engine(fake_config(SLOW | {"hang_at_step": 10, "once": str(tmp_path / "once")})) as client:
        pid = client.pid
        failing = asyncio.create_task(fails(client, EngineUnavailable))
        await until(lambda: (tmp_path / "once").exists())
        with impatient(client):
            await failing
        await comes_back(client, pid)


async def test_a_stuck_process_is_seen_and_ended():
    """Not even heartbeats come: the process is stopped as a whole."""
    async with engine(fake_config(SLOW)) as client:
        pid = client.pid
        flowing = asyncio.Event()
        failing = asyncio.create_task(fails(client, EngineUnavailable, flowing=flowing))
        await flowing.wait()
        os.kill(pid, signal.SIGSTOP)
        with impatient(client):
            await failing
        await comes_back(client, pid)


def test_the_age_of_one_step_counts_not_of_many():
    client = EngineClient(fake_config())
    beat = Heartbeat(stats=None, step_started=None, steps_total=0, step_seconds_total=0.0, at=0.0, work=None)
    client._last_heard = 100.0
    assert client._stuck_seconds(101.0) == 1.0
    for started, seconds in ((None, 1.0), (98.0, 3.0), (100.5, 1.0)):
        client.heartbeat = msgspec.structs.replace(beat, step_started=started)
        assert client._stuck_seconds(101.0) == seconds


async def test_a_rest_is_no_stuck_step():
    async with engine(fake_config()) as client:
        assert (await collect(client, add())).finish_reason == "length"
        await at_rest(client)
        client._last_heard -= 10_000
        stream = client.submit(add())
        assert client._stuck_seconds(time.monotonic()) < client.config.step_timeout_s
        await stream.aclose()


async def test_an_engine_that_dies_again_and_again_stays_dead():
    async with engine(fake_config({"exit_at_step": 1}), max_restarts=2) as client:
        for _ in range(3):
            await until(lambda: client.state == "ready")
            with pytest.raises(EngineUnavailable, match="died"):
                await collect(client, add())
        await until(lambda: client.state == "dead")
        assert client.restarts_total == 2
        with pytest.raises(EngineUnavailable, match="not running"):
            client.submit(add())
        assert await client.drain(1)


async def test_death_while_draining():
    async with engine(fake_config(SLOW)) as client:
        flowing = asyncio.Event()
        failing = asyncio.create_task(fails(client, EngineUnavailable, flowing=flowing))
        await flowing.wait()
        draining = asyncio.create_task(client.drain(LIMIT_S))
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGKILL)
        assert await draining
        await failing
        await asyncio.sleep(2 * FIRST_BACKOFF_S)
        assert client.pid is None  # nobody needs another one


async def test_soak():
    """Random lengths, cancels at random times, failing steps, too few blocks: all ends, every block is free, no request is open."""
    script = {"step_seconds": 0.001, "raise_at_step": [150, 400]}
    fields = {"num_gpu_blocks_override": 24, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 8}
    dice = random.Random(7)
    ends: dict[str, int] = {}

    async def one(client: EngineClient) -> None:
        prompt = tuple(dice.choice(((1,) * 40, (2,) * 20, ())) + tuple(dice.randrange(256) for _ in range(dice.randint(1, 40))))
        stream = client.submit(add(prompt, max_tokens=dice.randint(1, 48), ignore_eos=dice.random() < 0.5))
        patience = dice.randint(0, 30) if dice.random() < 0.3 else 10**6
        end = "cancelled"
        try:
            async for output in stream:
                patience -= len(output.token_ids)
                if patience < 0:
                    break
                end = output.finish_reason or end
        except RequestFailed:
            end = "error"
        finally:
            await stream.aclose()
        ends[end] = ends.get(end, 0) + 1

    async def user(client: EngineClient) -> None:
        for _ in range(12):
            await asyncio.wait_for(one(client), LIMIT_S)

    async with engine(fake_config(script, swap_space=1, **fields)) as client:
        await asyncio.gather(*(user(client) for _ in range(24)))
        await at_rest(client)
        assert client.restarts_total == 0
        assert min(ends.get(end, 0) for end in ("stop", "length", "cancelled", "error")) > 0, ends
