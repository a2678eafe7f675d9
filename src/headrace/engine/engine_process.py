"""The engine's child process seen from the parent: spawn it, talk in frames, end it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.engine.wire import HEADER_BYTES, Configure, FromEngine, Shutdown, ToEngine, WireError, body_length, decode_from_engine, encode_frame

REAP_PAUSE_S = 0.01
SPIN_COUNT = 1000  # microseconds rather than milliseconds of spinning; see child_environment


def child_environment() -> dict[str, str]:
    """The parent's environment, and short spinning of the compute threads unless the user has said how they wait.

    torch's threads spin while they wait for each other. By default they do so far longer than a step's gaps, and on a machine where
    anything else wants a core (the HTTP process, for one) the spinning thread keeps the one it waits for from running: a step of
    60 ms was measured to take 1.9 s beside one busy process.
    """
    environment = dict(os.environ)
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    return environment


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedEngine:
    """A child that has its config and loads, and to which nobody listens yet. Use as a context: where it ends, the child does."""

    popen: subprocess.Popen[bytes]
    connection: socket.socket

    def __enter__(self) -> LaunchedEngine:
        return self

    def __exit__(self, *failure: object) -> None:
        self.end()

    def end(self) -> None:
        self.connection.close()
        self.popen.kill()  # a no-op for a child that has been reaped
        self.popen.wait()


def launch(config: EngineConfig) -> LaunchedEngine:
    """Starts a child, from the thread that will listen to it: the child dies with the thread that made it.

    A fresh interpreter, not a fork: the parent has threads, and torch does not survive a fork of them.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "headrace.engine.engine_host", str(theirs.fileno())]
    with theirs:
        try:
            popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=child_environment())
        except OSError:
            ours.close()
            raise
    launched = LaunchedEngine(popen=popen, connection=ours)
    with suppress(OSError):  # a child that has died already is noticed where it is listened to
        ours.sendall(encode_frame(Configure(config)))  # far less than a socket takes at once
    return launched


class Frames(asyncio.Protocol):
    """Cuts what arrives into bodies of frames. There is one for each step: asyncio's stream reader would wake its task twice for it."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # a frame that is not whole yet
        self._bodies: deque[bytearray] = deque()
        self._error: WireError | None = None
        self._ended = False
        self._woken: asyncio.Future[None] | None = None  # `next` waits for it

    async def next(self) -> bytearray | None:
        """The next body; None at the end of the stream, also in mid-frame. Raises `WireError`. One caller at a time."""
        while not self._bodies:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._woken = asyncio.get_running_loop().create_future()
            try:
                await self._woken
            finally:
                self._woken = None
        return self._bodies.popleft()

    def data_received(self, data: bytes) -> None:
        buffer, start = self._buffer, 0
        buffer += data
        try:
            while len(buffer) >= (body := start + HEADER_BYTES) and len(buffer) >= (end := body + body_length(buffer[start:body])):
                self._bodies.append(buffer[body:end])
                start = end
        except WireError as error:
            self._error = error
        del buffer[:start]
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


class EngineProcess:
    """One child. Whoever made it must call `kill()` or `close()`; both may be called again."""

    def __init__(self, popen: subprocess.Popen[bytes], transport: asyncio.WriteTransport, frames: Frames) -> None:
        self._popen = popen
        self._transport = transport
        self._frames = frames

    @classmethod
    async def spawn(cls, config: EngineConfig) -> EngineProcess:
        """Starts the child and hands it its config, which takes a few milliseconds, from the event loop's own thread."""
        return await cls.adopt(launch(config))

    @classmethod
    async def adopt(cls, launched: LaunchedEngine) -> EngineProcess:
        """Listens to a child from now on."""
        try:
            transport, frames = await asyncio.get_running_loop().create_unix_connection(Frames, sock=launched.connection)
        except BaseException:
            launched.end()
            raise
        return cls(launched.popen, transport, frames)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, message: ToEngine) -> None:
        """Never blocks: the child's reader thread takes everything at once. Raises `WireError` for what cannot be encoded."""
        self._transport.write(encode_frame(message))

    async def receive(self) -> FromEngine | None:
        """The next message; None when the child's end is closed. Raises `WireError` for bytes that are none of ours."""
        body = await self._frames.next()
        return None if body is None else decode_from_engine(body)

    async def close(self, grace: float) -> None:
        """Asks the child to end; kills it after `grace` seconds."""
        if self._popen.poll() is None and not self._transport.is_closing():
            self.send(Shutdown())
        with suppress(TimeoutError):  # it would not go by itself
            await asyncio.wait_for(self._reap(), grace)
        await self.kill()

    async def kill(self) -> int:
        """Kills the child if it lives, reaps it, and returns its exit code (negative: the signal that ended it)."""
        self._popen.kill()  # a no-op for a child that has been reaped
        code = await self._reap()
        if not self._transport.is_closing():
            self._transport.abort()
        return code

    async def _reap(self) -> int:
        # Not in a thread: at the interpreter's exit, where an `LLM` nobody closed ends, none can be started any more.
        while (code := self._popen.poll()) is None:  # noqa: ASYNC110 - and no event tells of it
            await asyncio.sleep(REAP_PAUSE_S)
        return code
