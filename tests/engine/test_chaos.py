"""Engines that fail: every open stream ends with an error, the engine comes back, and new requests are answered."""

import asyncio
import os
import random
import signal

import pytest

from headrace.engine.client import EngineClient
from headrace.errors import EngineUnavailable, RequestFailed
from tests.engine.fake_engine import add, at_rest, collect, engine, fake_config, until

SLOW = {"step_seconds": 0.01}


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

    await asyncio.wait_for(asyncio.gather(*(one() for _ in range(4))), 20)


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
    config = fake_config(SLOW | {"hang_at_step": 10, "once": str(tmp_path / "once")}, step_timeout_s=0.6)
    async with engine(config) as client:
        pid = client.pid
        await fails(client, EngineUnavailable)
        await comes_back(client, pid)


async def test_a_stuck_process_is_seen_and_ended():
    """Not even heartbeats come: the process is stopped as a whole."""
    async with engine(fake_config(SLOW, step_timeout_s=0.6)) as client:
        pid = client.pid
        flowing = asyncio.Event()
        failing = asyncio.create_task(fails(client, EngineUnavailable, flowing=flowing))
        await flowing.wait()
        os.kill(pid, signal.SIGSTOP)
        await failing
        await comes_back(client, pid)


async def test_long_steps_are_no_stuck_steps():
    """Many steps that together take longer than the limit, and a rest that does: nobody is killed."""
    async with engine(fake_config({"step_seconds": 0.1}, step_timeout_s=0.5)) as client:
        assert (await collect(client, add(max_tokens=10))).finish_reason == "length"
        await asyncio.sleep(0.8)
        assert (await collect(client, add(max_tokens=3))).finish_reason == "length"
        assert client.restarts_total == 0


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
        draining = asyncio.create_task(client.drain(10))
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGKILL)
        assert await draining
        await failing
        await asyncio.sleep(0.3)
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

    async def user(client: EngineClient, until_time: float) -> None:
        while asyncio.get_running_loop().time() < until_time:
            await asyncio.wait_for(one(client), 20)

    async with engine(fake_config(script, swap_space=1, **fields)) as client:
        until_time = asyncio.get_running_loop().time() + 4
        await asyncio.gather(*(user(client, until_time) for _ in range(24)))
        await at_rest(client)
        assert client.restarts_total == 0
        assert min(ends.get(end, 0) for end in ("stop", "length", "cancelled", "error")) > 0, ends
