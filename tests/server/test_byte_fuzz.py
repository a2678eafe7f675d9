"""Random and mutated bytes on the raw socket: each connection gets an answer or its end, never a 5xx, and the server lives."""

import asyncio
import os
import random
import re

import httpx
import pytest

from tests.patience import LIMIT_S
from tests.scripts.load_script import load_script
from tests.server.sites import Site, until

ROUNDS = int(os.environ.get("HEADRACE_BYTE_FUZZ_ROUNDS", "12"))
SEED = int(os.environ.get("HEADRACE_BYTE_FUZZ_SEED", "1"))
fuzz_bytes = load_script("fuzz_bytes")
ATTACKS = [attack for attack in fuzz_bytes.HTTP_ATTACKS if attack is not fuzz_bytes.slow]  # that one takes longer than a test may


async def send(site: Site, data: bytes, *, cut: int) -> bytes:
    """What comes back until the server is silent for a while; then the client hangs up."""
    reader, writer = await site.connect()
    received = b""
    try:
        writer.write(data[:cut])
        await asyncio.sleep(0)
        writer.write(data[cut:])
        while part := await asyncio.wait_for(reader.read(65536), 0.25):
            received += part
    except (TimeoutError, ConnectionError):
        pass  # it waits for the rest of a request that was cut short, or refused bytes that were still being sent
    finally:
        writer.close()
    return received


@pytest.mark.parametrize("world", [{"body_timeout": 2.0}], indirect=True)
async def test_no_bytes_hang_or_break_the_server(site: Site):
    chance = random.Random(SEED)
    count, answered = 0, 0
    for _ in range(ROUNDS):
        batch = [b"".join(chance.choice(ATTACKS)(chance).pieces) for _ in range(32)]
        answers = await asyncio.wait_for(asyncio.gather(*(send(site, data, cut=chance.randrange(len(data) + 1)) for data in batch)), 2 * LIMIT_S)
        for data, answer in zip(batch, answers, strict=True):
            statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)
            assert not any(status.startswith(b"5") for status in statuses), f"{data!r}: {answer!r}"
            answered += bool(statuses)
        count += len(batch)
    assert answered > count / 4
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        assert (await client.get(f"http://127.0.0.1:{site.port}/ready")).status_code == 200
    service = site.world.service
    await until(lambda: not (service.admission.active or service.bodies.used or site.world.generator.open))
    assert service.metrics.faults == 0
