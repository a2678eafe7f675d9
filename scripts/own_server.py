"""A server of one's own, for the scripts here that load or torment one: `headrace serve` on free ports, gone when the block ends."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from plain_http import get_text

END_SECONDS = 90.0  # that a server may take after SIGTERM


@dataclass(slots=True, kw_only=True)
class OwnServer:
    url: str
    grpc_address: str | None  # host:port, where it was started with --grpc-port
    process: subprocess.Popen[str]
    log: IO[str]

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def kill(self) -> None:
        """As `kill -9` of the process that serves: nobody in it has a say."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """As SIGTERM; its exit status. It is killed where it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SystemExit("the server does not end after SIGTERM") from None


@contextlib.contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[OwnServer]:
    """A server that is ready. `arguments` are flags of `headrace serve`. Raises SystemExit with its log where it does not start."""
    with tempfile.TemporaryFile("w+") as log:
        # port 0: the server chooses, and its ready message says which
        command = [sys.executable, "-m", "headrace", "serve", *arguments, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                yield OwnServer(process=process, log=log, **_addresses(process, log))
            finally:
                if process.poll() is None:
                    process.terminate()
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


def _addresses(process: subprocess.Popen[str], log: IO[str]) -> dict[str, str | None]:
    """What the ready message says."""
    assert process.stdout is not None
    lines: list[str] = []
    while (line := process.stdout.readline()) and not line.startswith("  try"):
        lines.append(line)
    text = "".join(lines)
    ready, grpc = re.search(r" is ready at (\S+)", text), re.search(r"^  gRPC +(\S+),", text, re.MULTILINE)
    if ready is None:
        process.wait(END_SECONDS)
        log.seek(0)
        raise SystemExit(f"the server does not start: {text}{log.read()[-2000:]}")
    return {"url": ready[1], "grpc_address": grpc and grpc[1]}


AT_REST = ("headrace_num_requests_running", "headrace_num_requests_waiting", "headrace_num_requests_swapped", "headrace_kv_cache_usage_perc")


def read_metrics(text: str) -> dict[str, float]:
    """Sums over the labels of each metric."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            sums[name] = sums.get(name, 0.0) + value
    return sums


def metrics_at_rest(url: str, seconds: float) -> dict[str, float]:
    """The metrics once nothing runs and all blocks are free, or as they are after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        metrics = read_metrics(get_text(url, "/metrics"))
        if not any(metrics[name] for name in AT_REST) or time.monotonic() > deadline:
            return metrics
        time.sleep(0.2)
