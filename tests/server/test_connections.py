"""What only a real socket shows: clients that hang up, framing, bytes that are no HTTP, large bodies beside a stream."""

import asyncio
import json
import time

import httpx
import pytest

from headrace.server import protocol
from headrace.server.protocol import MAX_HEAD_BYTES, BoundedHttpProtocol
from tests.patience import LIMIT_S
from tests.server.fakes import refused
from tests.server.sites import Site, until


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_hangs_up_frees_everything(site: Site, stream: bool, started: bool):
    world = site.world
    world.generator.pause = asyncio.Event()
    world.generator.delay = {} if started else {1: 60}
    _, writer = await site.connect()
    writer.write(site.wire("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 50, "stream": stream}))
    await until(lambda: world.generator.open == 2)
    assert world.service.admission.active == 1
    writer.close()
    await until(lambda: world.generator.open == 0 and world.service.admission.active == 0)
    assert world.service.bodies.used == 0
    text = world.service.metrics.render(None, state="ready")[0].decode()
    assert 'headrace_request_success_total{finished_reason="abort",model_name="tiny"} 4.0' in text
    outcome = "2xx" if stream and started else "client_gone"
    assert f'headrace_http_requests_total{{outcome="{outcome}",path="/v1/completions"}} 1.0' in text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "stream": True}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True}),
    ],
)
async def test_hanging_up_frees_everything_on_every_route(site: Site, path: str, body: dict[str, object]):
    world = site.world
    world.generator.pause = asyncio.Event()
    reader, writer = await site.connect()
    writer.write(site.wire(path, body))
    await until(lambda: world.generator.open == 1)
    if "stream" in body:
        await asyncio.wait_for(reader.readuntil(b"delta"), LIMIT_S)
    writer.close()
    await until(lambda: world.generator.open == 0 and world.service.admission.active == 0)
    assert world.service.bodies.used == 0
    assert world.service.metrics.faults == 0


async def test_a_connection_serves_on_after_a_stream(site: Site):
    reader, writer = await site.connect()
    for _ in range(2):
        writer.write(site.wire("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True}))
        received = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), LIMIT_S)
        assert received.startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]" in received
    writer.close()


async def test_events_are_written_while_the_answer_is_made(site: Site):
    site.world.generator.pause = asyncio.Event()
    reader, writer = await site.connect()
    writer.write(site.wire("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}))
    first = await asyncio.wait_for(reader.readuntil(b'"H"}'), LIMIT_S)
    assert b'"role":"assistant"' in first
    site.world.generator.pause.set()
    assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), LIMIT_S)
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n",
        b"GET /" + b"a" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 40_000 + b"\r\n",
    ],
)
async def test_bytes_that_are_no_request_get_a_400_and_the_server_lives(site: Site, data: bytes):
    answer = await site.raw(data)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert b'"error"' in answer
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        assert (await client.get(f"http://127.0.0.1:{site.port}/health")).status_code == 200


async def test_a_head_that_does_not_end_is_cut_off(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 0.1)
    for data in (b"", b"GET /health HTTP/1.1\r\nHost:"):
        assert await site.raw(data) == b""


async def test_between_requests_a_connection_may_be_idle(site: Site, monkeypatch: pytest.MonkeyPatch):
    """The time for a head runs until the head is there, and again from the first byte of the next one."""
    begun: list[BoundedHttpProtocol] = []
    start = BoundedHttpProtocol._start_head_timer
    monkeypatch.setattr(BoundedHttpProtocol, "_start_head_timer", lambda protocol: (begun.append(protocol), start(protocol)))
    reader, writer = await site.connect()
    for count in (1, 2):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"}"), LIMIT_S)).startswith(b"HTTP/1.1 200")
        assert len(begun) == count
        assert begun[-1]._head_timer is None
    writer.close()


async def test_a_chunked_body_is_read_whole(site: Site):
    reader, writer = await site.connect()
    body = json.dumps({"prompt": "héé"}).encode()
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    for byte in body:
        writer.write(b"1\r\n%c\r\n" % byte)
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")
    assert b'"count":5' in await asyncio.wait_for(reader.read(), LIMIT_S)
    writer.close()


@pytest.mark.parametrize("world", [{"max_body_bytes": 32 << 20}], indirect=True)
async def test_a_large_body_does_not_stop_a_stream(site: Site):
    """While bodies of 20 MB and of 10,000 levels are refused, a running stream goes on."""
    bodies = [
        json.dumps({"prompt": "word " * 4_000_000}).encode(),
        b'{"prompt": [' + b"{}," * 6_000_000 + b"{}]}",
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ]
    turns: list[float] = []  # seconds of a core, of all threads: a pause of the machine is none, the interpreter lock held by another thread is
    received: list[bytes] = []
    finished = asyncio.Event()

    async def watch() -> None:
        while not finished.is_set():
            begin = time.process_time()
            await asyncio.sleep(0)
            turns.append(time.process_time() - begin)

    async def stream() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
            while not finished.is_set():
                async with client.stream(
                    "POST", f"http://127.0.0.1:{site.port}/v1/completions", json={"prompt": "x", "max_tokens": 100, "stream": True}
                ) as response:
                    received.extend([part async for part in response.aiter_raw()])

    running = [asyncio.create_task(stream()), asyncio.create_task(watch())]
    await until(lambda: received)
    before = len(received)

    def send_all() -> list[httpx.Response]:
        with httpx.Client(trust_env=False, timeout=LIMIT_S) as client:
            return [client.post(f"http://127.0.0.1:{site.port}/v1/completions", content=body) for body in bodies]

    answers = await asyncio.to_thread(send_all)
    during = len(received) - before
    finished.set()
    await asyncio.gather(*running)
    for response in answers:
        refused(response)
    assert during > 0
    assert max(turns) < 0.25, f"the event loop stood still for {max(turns):.3f} s"


async def test_the_official_client(site: Site):
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{site.port}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "other/name"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
        plain = await client.chat.completions.create(**chat)
        async with client.chat.completions.stream(**chat) as stream:
            pieces = [event.delta async for event in stream if event.type == "content.delta"]
        assert "".join(pieces) == plain.choices[0].message.content
        asked = {"model": "tiny", "prompt": "x", "max_tokens": 5}
        completion = await client.completions.create(**asked)
        chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == completion.choices[0].text
        assert chunks[-1].usage.completion_tokens == 5
        embeddings = await client.embeddings.create(model="tiny", input=["ab", "c"])
        assert [len(item.embedding) for item in embeddings.data] == [8, 8]
        assert embeddings.usage.total_tokens == 3
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(**chat, temperature=-3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="nope", prompt="x")
        assert missing.value.code == "model_not_found"
