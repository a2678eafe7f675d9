"""One `headrace serve` with the default model, as `scripts/test-clients` starts it for other people's clients.

These tests run in an environment of their own, in which Headrace is not installed: whatever they know of it comes over the wire.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-clients"
SERVER_PYTHON = os.environ.get("HEADRACE_SERVER_PYTHON")  # the Python that has Headrace; set by scripts/test-clients
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet for prices
if SERVER_PYTHON is None:
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    grpc_address: str
    model: str

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    flags = ["--port", "0", "--grpc-port", "0", "--api-key", KEY, "--threads", "1"]
    command = [str(SERVER_PYTHON), "-m", "headrace", "serve", *flags]
    with log.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            yield wait_ready(process, log)
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> Server:
    deadline = time.monotonic() + 300  # the first start fetches the model
    while True:
        text = log.read_text()
        found = re.search(r" is ready at (?P<url>\S+)\n +model +(?P<model>[^,]+),.* gRPC +(?P<grpc>[^,]+),", text, re.DOTALL)
        if found is not None:
            return Server(url=found["url"], grpc_address=found["grpc"], model=found["model"])
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
