"""Clients that send or read a byte at a time are bounded, and hold up nobody else."""

import asyncio
import json

import httpx
import pytest

from tests.patience import LIMIT_S
from tests.server.sites import Site, until

NO_READ_TOKENS = 200_000


async def others_are_served(site: Site) -> None:
    """Other clients get whole answers, though the slow ones are still there: the limit is one for hangs."""
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        for _ in range(10):
            response = await client.post(f"http://127.0.0.1:{site.port}/v1/completions", json={"prompt": "x", "max_tokens": 20})
            assert response.status_code == 200


async def test_an_answer_that_nobody_reads_waits_in_bounded_memory(site: Site):
    """The transport's buffers fill up, and then no more of the answer is asked for."""
    world = site.world
    world.service.loaded = world.with_context(2 * NO_READ_TOKENS)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1024)
    writer.write(site.wire("/v1/completions", {"prompt": "x", "max_tokens": NO_READ_TOKENS, "stream": True}))
    await asyncio.wait_for(reader.readuntil(b"data: "), LIMIT_S)
    counts = [-1, await generated(site)]
    while counts[-1] != counts[-2]:
        await asyncio.sleep(0.3)
        counts.append(await generated(site))
    assert counts[-1] < NO_READ_TOKENS / 2
    await others_are_served(site)
    for _ in range(5):  # a byte at a time makes no difference
        assert len(await reader.read(1)) == 1
        await asyncio.sleep(0.02)
    assert await generated(site) < NO_READ_TOKENS / 2
    writer.close()
    await until(lambda: world.generator.open == 0 and world.service.admission.active == 0)


async def generated(site: Site) -> float:
    """Tokens that the server has taken from the engine."""
    text = site.world.service.metrics.render(None, state="ready")[0].decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith("headrace_generation_tokens_total{")))


@pytest.mark.parametrize("world", [{"body_timeout": 0.4}], indirect=True)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize", "/v1/messages"])
async def test_a_body_that_comes_a_byte_at_a_time_is_ended(site: Site, path: str):
    reader, writer = await site.connect()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode())

    async def trickle() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.05)

    sending = asyncio.create_task(trickle())
    await others_are_served(site)
    answer = await asyncio.wait_for(reader.read(), LIMIT_S)
    sending.cancel()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])
    assert site.world.service.bodies.used == 0
    writer.close()


async def test_many_slow_heads_hold_up_nobody(site: Site):
    connections = [await site.connect() for _ in range(100)]
    for _, writer in connections:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ")
    await others_are_served(site)
    assert not any(reader.at_eof() for reader, _ in connections)
    for _, writer in connections:
        writer.close()
