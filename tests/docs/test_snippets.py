"""The README and the first steps, done as they are written, with the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks, commands

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

README, START = ROOT / "README.md", ROOT / "docs/start.md"
BIN = Path(sys.executable).parent
URL = "http://127.0.0.1:8000"


def run(command: list[str], *, input: str | None = None) -> str:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    """URL of a server as the README's first command starts it (another port), and its ready message."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            while " is ready at " not in (line := process.stdout.readline()):  # a first start may say before that it compiles its kernels
                assert line, "the server has ended"
            lines = [line]
            while not lines[-1].lstrip().startswith("-d"):
                lines.append(process.stdout.readline())
            yield lines[0].split(" is ready at ")[1].strip(), "".join(lines)
        finally:
            process.terminate()
    assert process.returncode == 0


def curl(command: str) -> str:
    """The answer's text."""
    return str(json.loads(run(["bash", "-c", command.replace("curl ", "curl -sS ", 1)]))["choices"][0]["message"]["content"])


@pytest.mark.parametrize("page", [README, START], ids=lambda page: page.name)
def test_the_printed_request(server: tuple[str, str], page: Path) -> None:
    [command] = [command for command in commands(page) if command.startswith("curl")]
    assert "Paris" in curl(command.replace(URL, server[0]))


def test_the_ready_message_can_be_pasted(server: tuple[str, str]) -> None:
    command = server[1].split("  try\n")[1].replace("\\\n", " ").strip()
    assert "Paris" in curl(command)


def test_the_official_client(server: tuple[str, str]) -> None:
    [code] = [block for block in blocks(START, "python") if "openai" in block]
    assert "Paris" in run([sys.executable, "-c", code.replace(URL, server[0])])


def test_chat_over_the_url(server: tuple[str, str]) -> None:
    lines = "What is the capital of France?\n/exit\n"
    assert "Paris" in run([sys.executable, "-m", "headrace", "chat", "--url", server[0], "--temperature", "0"], input=lines)


def test_chat_with_a_model_of_its_own() -> None:
    answer = run([sys.executable, "-m", "headrace", "chat", "--temperature", "0"], input="What is the capital of France?\n")
    assert "Paris" in answer


def test_generate_from_a_pipe() -> None:
    [command] = [command for command in commands(README) if "headrace generate" in command]
    answer = json.loads(run(["bash", "-c", command]))
    assert "Paris" in answer["choices"][0]["text"]


@pytest.mark.parametrize("page", [README, START], ids=lambda page: page.name)
def test_python(page: Path) -> None:
    [code] = [block for block in blocks(page, "python") if "LLM(" in block]
    output = run([sys.executable, "-c", code])
    assert "Paris" in output
