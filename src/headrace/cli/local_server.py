"""A server of our own for one program: on the loopback address, and gone when the program is."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from headrace.cli.chat_client import ChatClient
from headrace.cli.sigterm import ended_by_sigterm
from headrace.errors import StartError

START_TIMEOUT = 600.0  # seconds; a large model on a slow disk takes minutes
STOP_TIMEOUT = 10.0


@contextlib.contextmanager
def local_server(model: Path, arguments: Sequence[str] = (), *, key: str | None = None) -> Iterator[ChatClient]:
    """Serve `model` in another process until the block ends, behind a key that nobody else knows, or `key`, for other clients than the one that is
    given. Raises `StartError` as `server_process` does."""
    key, port = key or secrets.token_hex(16), free_port()
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *arguments]
    client = ChatClient(f"http://127.0.0.1:{port}", api_key=key)
    # the key is not on the command line, where other users of the machine could read it
    with server_process(command, environment={**os.environ, "HEADRACE_API_KEY": key}, client=client):
        yield client


@contextlib.contextmanager
def server_process(command: Sequence[str], *, environment: Mapping[str, str], client: ChatClient) -> Iterator[subprocess.Popen[bytes]]:
    """A server that says at `/ready` that it is. Raises `StartError` with its last words if it does not start."""
    with ended_by_sigterm(), tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for us alone
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while not _is_ready(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise StartError(f"The model does not start: {log.read().strip()[-1000:] or f'status {process.returncode}'}")
                time.sleep(0.05)
            yield process
        finally:
            _stop(process)


def _is_ready(client: ChatClient) -> bool:
    try:
        return client.status("/ready") == 200
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
