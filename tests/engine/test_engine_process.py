"""What the engine's process is started with, and how what it says is read."""

import asyncio
import struct

import pytest

from headrace.engine.engine_process import Frames, child_environment
from headrace.engine.wire import WireError


def test_compute_threads_spin_shortly_unless_the_user_has_a_say(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert child_environment()["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert child_environment()["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in child_environment()


def frames_of(*pieces: bytes) -> Frames:
    frames = Frames()
    for piece in pieces:
        frames.data_received(piece)
    return frames


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_frames_come_whole_however_the_bytes_are_cut(size: int) -> None:
    sent = [bytes([number]) * length for number, length in enumerate((1, 5, 300, 2))]
    data = b"".join(struct.pack("<I", len(body)) + body for body in sent)
    frames = frames_of(*(data[at : at + size] for at in range(0, len(data), size)))
    assert [await frames.next() for _ in sent] == sent
    waiting = asyncio.ensure_future(frames.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    frames.data_received(struct.pack("<I", 1) + b"x")
    assert await waiting == b"x"


async def test_the_end_comes_after_what_was_sent_also_in_mid_frame() -> None:
    frames = frames_of(struct.pack("<I", 1) + b"x" + struct.pack("<I", 9) + b"part")
    frames.connection_lost(None)
    assert await frames.next() == b"x"
    assert await frames.next() is None
    assert await frames.next() is None


async def test_bytes_that_are_no_frame_are_an_error_after_what_was_good() -> None:
    frames = frames_of(struct.pack("<I", 1) + b"x" + struct.pack("<I", 0))
    assert await frames.next() == b"x"
    with pytest.raises(WireError):
        await frames.next()
