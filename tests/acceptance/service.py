"""`headrace serve` as a process of its own, for tests of compiled paths on a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.patience import LIMIT_S
from tests.patience import until as wait

ROOT = Path(__file__).parents[2]
FLAGS = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--kv-memory", "16MiB", "--block-size", "4", "--threads", "1"]


class Service:
    """A server. Its log is `log.txt` in `home`."""

    def __init__(self, model: Path, home: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self._log = home / "log.txt"
        command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", "0", *FLAGS, *flags]
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._url = ""

    @property
    def log(self) -> str:
        return self._log.read_text()

    def is_ready(self) -> bool:
        assert self.popen.poll() is None, self.log
        place = self.log.partition(" is ready at ")[2].split()
        self._url = place[0] if place and self.log.count("\n") > 1 else ""
        return bool(self._url)

    def ready(self) -> dict[str, Any]:
        """The body of /ready."""
        told: dict[str, Any] = httpx.get(f"{self._url}/ready", timeout=LIMIT_S, trust_env=False).json()
        return told

    def states(self) -> dict[str, str]:
        """Name and state of each path."""
        return {path["name"]: path["state"] for path in self.ready()["compile"]["paths"]}

    def complete(self) -> str:
        body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{self._url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self._url}/metrics", timeout=LIMIT_S, trust_env=False).text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        self.popen.wait(LIMIT_S)


@contextmanager
def served(model: Path, home: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Service]:
    service = Service(model, home, *flags, environment=environment)
    try:
        wait(service.is_ready, 120)
        yield service
    finally:
        service.end()


def without_compiler(home: Path) -> dict[str, str]:
    """An environment with an empty PATH and an empty kernel cache."""
    (home / "bin").mkdir()
    return {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(home / "bin"), "HEADRACE_HOME": str(home)}
