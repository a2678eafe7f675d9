"""Writes of one turn of the event loop leave in one piece."""

import asyncio

import pytest

from headrace.server import protocol
from headrace.server.protocol import GATHERED_BYTES, GatheredWrites
from tests.server.sites import Site


class Recorder:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


async def test_writes_of_one_turn_are_one(recorder: Recorder) -> None:
    writes = GatheredWrites(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    writes.write(b"head ")
    writes.write(b"body")
    assert recorder.written == []
    await asyncio.sleep(0)
    assert recorder.written == [b"head body"]
    writes.write(b"next")
    await asyncio.sleep(0)
    assert recorder.written == [b"head body", b"next"]


async def test_much_is_not_held_back(recorder: Recorder) -> None:
    writes = GatheredWrites(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    writes.write(b"a" * GATHERED_BYTES)
    writes.write(b"b")
    assert [len(data) for data in recorder.written] == [GATHERED_BYTES + 1]
    await asyncio.sleep(0)
    assert len(recorder.written) == 1


async def test_closing_sends_first_and_a_lost_connection_gets_nothing(recorder: Recorder) -> None:
    writes = GatheredWrites(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    writes.write(b"last")
    writes.close()
    assert recorder.written == [b"last"]
    assert writes.is_closing()
    writes.write(b"late")
    await asyncio.sleep(0)
    assert recorder.written == [b"last"]


async def test_head_and_body_of_an_answer_are_one_write(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    class Watched(GatheredWrites):
        def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
            super().__init__(transport, loop)
            write = transport.write
            self._transport = Recorder()  # type: ignore[assignment]
            self._transport.write = lambda data: (written.append(data), write(data))[1]  # type: ignore[assignment, method-assign, return-value]
            self._transport.__dict__["get_extra_info"] = transport.get_extra_info

    monkeypatch.setattr(protocol, "GatheredWrites", Watched)
    reader, writer = await site.connect()
    writer.write(site.wire("/v1/completions", {"prompt": "a", "max_tokens": 1}))
    data = await reader.read(65536)
    writer.close()
    assert written == [data]
    assert data.startswith(b"HTTP/1.1 200")
    assert data.endswith(b"}")
