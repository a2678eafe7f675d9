"""The Node clients, with the tests in `node/`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, Server

FOLDER = Path(__file__).parent / "node"


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("*.test.js")))
def test_node(server: Server, name: str):
    environment = {**os.environ, "HEADRACE_URL": server.url, "HEADRACE_KEY": KEY, "HEADRACE_MODEL": server.model}
    done = subprocess.run(["node", "--test", name], cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
