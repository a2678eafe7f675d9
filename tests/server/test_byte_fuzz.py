"""Random and mutated bytes on the raw socket: each connection gets an answer or its end, never a 5xx, and the server lives."""

import asyncio
import json
import os
import random
import re

import httpx
import pytest

from tests.patience import LIMIT_S
from tests.server.sites import Site, until

ROUNDS = int(os.environ.get("HEADRACE_BYTE_FUZZ_ROUNDS", "12"))
SEED = int(os.environ.get("HEADRACE_BYTE_FUZZ_SEED", "1"))
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/health", "/v1/models", "/nope")
BODIES = (
    {"prompt": "hello", "max_tokens": 3},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True},
    {"input": "x"},
    {"tokens": [1, 2]},
)
HEADERS = (
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
)
BYTES = (b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"HTTP/1.0", b"HTTP/2.0", b"%00", b"{", b'"', b"\xff\xfe", b"-1")
PIECES = (*HEADERS, *BYTES, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def good(chance: random.Random) -> bytes:
    body = json.dumps(chance.choice(BODIES)).encode()
    head = f"{chance.choice(('POST', 'POST', 'GET', 'DELETE'))} {chance.choice(PATHS)} HTTP/1.1\r\nHost: x\r\n"
    if chance.random() < 0.3:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part)
        return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def mutated(chance: random.Random) -> bytes:
    data = bytearray(b"".join(good(chance) for _ in range(chance.randint(1, 3))))
    if chance.random() < 0.15:
        return chance.randbytes(chance.randint(1, 400))
    for _ in range(chance.randint(0, 6)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                data[at:at] = chance.choice(PIECES)
            case 2:
                del data[at : at + chance.randint(1, 30)]
            case 3:
                data[at:at] = data[at : at + chance.randint(1, 60)]
            case 4:
                data = data[: max(1, at)]
    return bytes(data)


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
        batch = [mutated(chance) for _ in range(32)]
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
