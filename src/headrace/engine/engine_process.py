"""The engine's child process seen from the parent: spawn it, talk in frames, end it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.engine.wire import HEADER_BYTES, Configure, FromEngine, Shutdown, ToEngine, body_length, decode_from_engine, encode_frame

READ_BUFFER_BYTES = 1024 * 1024
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


class EngineProcess:
    """One child. Whoever made it must call `kill()` or `close()`; both may be called again."""

    def __init__(self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls, config: EngineConfig) -> EngineProcess:
        """Starts the child and hands it its config, which takes a few milliseconds, from the event loop's own thread."""
        return await cls.adopt(launch(config))

    @classmethod
    async def adopt(cls, launched: LaunchedEngine) -> EngineProcess:
        """Listens to a child from now on."""
        try:
            reader, writer = await asyncio.open_unix_connection(sock=launched.connection, limit=READ_BUFFER_BYTES)
        except BaseException:
            launched.end()
            raise
        return cls(launched.popen, reader, writer)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, message: ToEngine) -> None:
        """Never blocks: the child's reader thread takes everything at once. Raises `WireError` for what cannot be encoded."""
        self._writer.write(encode_frame(message))

    async def receive(self) -> FromEngine | None:
        """The next message; None when the child's end is closed. Raises `WireError` for bytes that are none of ours."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return decode_from_engine(await self._reader.readexactly(body_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self, grace: float) -> None:
        """Asks the child to end; kills it after `grace` seconds."""
        if self._popen.poll() is None and not self._writer.is_closing():
            self.send(Shutdown())
        with suppress(TimeoutError):  # it would not go by itself
            await asyncio.wait_for(self._reap(), grace)
        await self.kill()

    async def kill(self) -> int:
        """Kills the child if it lives, reaps it, and returns its exit code (negative: the signal that ended it)."""
        self._popen.kill()  # a no-op for a child that has been reaped
        code = await self._reap()
        if not self._writer.is_closing():
            self._writer.transport.abort()
        return code

    async def _reap(self) -> int:
        # Not in a thread: at the interpreter's exit, where an `LLM` nobody closed ends, none can be started any more.
        while (code := self._popen.poll()) is None:  # noqa: ASYNC110 - and no event tells of it
            await asyncio.sleep(REAP_PAUSE_S)
        return code
