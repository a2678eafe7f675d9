"""The page of clients, done as it is written."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, Server
from tests.clients.test_llm import Command
from tests.clients.test_node import FOLDER
from tests.docs.markdown import ROOT, blocks, commands

PAGE = ROOT / "docs/clients.md"
PYTHON, JAVASCRIPT = blocks(PAGE, "python"), blocks(PAGE, "js")


def fitted(code: str, server: Server) -> str:
    """The code for the tests' server in place of the page's."""
    code = code.replace("http://127.0.0.1:8000", server.url).replace("127.0.0.1:8001", server.grpc_address)
    return code.replace('"none"', f'"{KEY}"').replace("Bearer none", f"Bearer {KEY}")


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python(server: Server, code: str):
    assert "Paris" in run(sys.executable, "-c", fitted(code, server))


@pytest.mark.parametrize("code", JAVASCRIPT, ids=range(len(JAVASCRIPT)))
def test_javascript(server: Server, code: str):
    assert "Paris" in run("node", "--input-type=module", "--eval", fitted(code, server))


def test_llm(server: Server, tmp_path: Path):
    [models] = blocks(PAGE, "yml")
    (tmp_path / "extra-openai-models.yaml").write_text(fitted(models, server) + "  api_key_name: headrace\n")
    (tmp_path / "keys.json").write_text(json.dumps({"headrace": KEY}))
    llm = Command(tmp_path)
    written = [shlex.split(command) for command in commands(PAGE) if command.startswith("llm ")]
    assert written
    for words in written:
        assert "Paris" in llm(*words[1:])
