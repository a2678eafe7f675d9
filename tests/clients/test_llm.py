"""The command `llm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.clients.conftest import KEY, Server
from tests.clients.tasks import ANSWER, FORM_QUESTION, QUESTION, TOOL_QUESTION, Place

FUNCTIONS = """
def weather(city: str) -> str:
    "Tells the weather of a city."
    return f"Sunny in {city}."
"""


class Command:
    def __init__(self, folder: Path) -> None:
        self._environment = {**os.environ, "LLM_USER_PATH": str(folder)}

    def __call__(self, *arguments: str) -> str:
        command = [str(Path(sys.executable).parent / "llm"), *arguments]
        done = subprocess.run(command, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def llm(server: Server, tmp_path: Path) -> Command:
    common = {"model_name": server.model, "api_base": server.openai_url, "api_key_name": "headrace", "supports_schema": True, "supports_tools": True}
    models = [{"model_id": "small", **common}, {"model_id": "small-responses", "responses": True, **common}]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    (tmp_path / "keys.json").write_text(json.dumps({"headrace": KEY}))
    return Command(tmp_path)


@pytest.fixture(params=["small", "small-responses"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_models(llm: Command):
    assert "small-responses" in llm("models", "list")


def limit(model: str, tokens: int) -> list[str]:
    return ["-m", model, "-o", "temperature", "0", "-o", "max_tokens", str(tokens)]


def test_chat_and_stream(llm: Command, model: str):
    streamed = llm(*limit(model, 24), QUESTION)
    assert ANSWER in streamed
    assert llm(*limit(model, 24), "--no-stream", QUESTION) == streamed
    assert llm("-c", "And of Italy?")


def test_typed(llm: Command, model: str):
    Place.model_validate_json(llm(*limit(model, 200), "--schema", json.dumps(Place.model_json_schema()), FORM_QUESTION))


def test_tool(llm: Command, model: str):
    """The command leaves it to the model whether to call."""
    assert llm(*limit(model, 60), "--functions", FUNCTIONS, "--chain-limit", "3", TOOL_QUESTION)
