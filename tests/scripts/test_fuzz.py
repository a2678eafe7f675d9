"""What the fuzzer sends, and how it reads what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from tests.scripts.load_script import load_script

fuzz_bytes = load_script("fuzz_bytes")
fuzz_frames = load_script("fuzz_frames")
fuzz = load_script("fuzz")

LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nHTTP/"
CHUNKED = b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nHTTP/\r\n0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "statuses", "whole"),
    [
        (b"", [], False),
        (b"HTT", [], False),
        (CONTINUE, [], False),
        (CONTINUE + LENGTH, [200], True),
        (LENGTH + CHUNKED + LENGTH, [200, 404, 200], True),
        (LENGTH[:-1], [200], False),
        (CHUNKED[:-2], [404], False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", [204], True),
        (b"HTTP/1.1 500 Oh\r\n\r\nto the end", [500], False),
    ],
)
def test_answers_are_read(data: bytes, statuses: list[int], whole: bool):
    assert fuzz_bytes.read_answers(data) == (statuses, whole)


def test_what_is_no_answer_is_told():
    for data in (b"hello", LENGTH + b"x", b"HTTP/1.1 abc\r\n\r\n"):
        with pytest.raises(ValueError, match="no HTTP"):
            fuzz_bytes.read_answers(data)


def test_attacks_are_many_and_the_same_for_a_seed():
    attacks = [*fuzz_bytes.HTTP_ATTACKS, *fuzz_frames.FrameAttacks("tiny").all]

    def all_of(seed: int) -> list[bytes]:
        chance = random.Random(seed)
        return [b"".join(make(chance).pieces) for make in attacks for _ in range(20)]

    assert all_of(1) == all_of(1)
    assert len(set(all_of(1)) & set(all_of(2))) < 30
    assert all(all_of(1))


def test_frames():
    chance = random.Random(3)
    data = b"".join(fuzz_frames.call(chance, "tiny", 1))
    assert data[3:5] == bytes([fuzz_frames.HEADERS, fuzz_frames.END_HEADERS])
    assert b":path" in data
    assert b"content-type" in data
    assert fuzz_frames.header_block(a=b"x" * 300)[3:6] == bytes([127, (300 - 127) % 128 + 128, 1])
    assert not fuzz_frames.call_has_ended(fuzz_frames.frame(fuzz_frames.SETTINGS) + fuzz_frames.frame(fuzz_frames.DATA, b"abc", stream=1))
    assert fuzz_frames.call_has_ended(fuzz_frames.frame(fuzz_frames.DATA, b"abc", stream=1) + fuzz_frames.frame(fuzz_frames.GOAWAY, bytes(8)))
    assert fuzz_frames.call_has_ended(fuzz_frames.frame(fuzz_frames.HEADERS, b"x", flags=5, stream=1))


@pytest.mark.parametrize(("answer", "ends", "done"), [(LENGTH, False, True), (b"", True, True), (b"HTTP", False, False)])
async def test_an_answer_and_an_end_are_told_from_silence(answer: bytes, ends: bool, done: bool):
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            if not ends:
                await reader.read()  # until the client goes
            writer.close()
            await writer.wait_closed()
        gone.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        attack = fuzz_bytes.Attack(kind="x", pieces=(b"a", b"b"))
        received, answered, _ = await fuzz.talk("127.0.0.1", port, attack, lambda data: fuzz_bytes.read_answers(data)[1], 0.5)
        await asyncio.wait_for(gone.wait(), 10)
    assert (received, answered) == (answer, done)
