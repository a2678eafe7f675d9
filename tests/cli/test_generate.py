"""Files in, JSONL out, against an engine that is scripted by the prompts."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from headrace.cli.main import main
from headrace.cli.prompt_files import Line, parse_line, read_lines
from headrace.config import EngineConfig
from headrace.engine import async_llm
from headrace.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from headrace.sampling_params import SamplingParams


class ScriptedLLM:
    """Answers with the prompt in capitals. Early prompts take longest, so that order is not luck."""

    made: list[ScriptedLLM]

    def __init__(self, model: str | None, **options: Any) -> None:
        self.model, self.options = model, options
        self.config = EngineConfig(model="", **{"max_num_seqs": 2, "max_num_batched_tokens": 8} | options)
        self.params: list[SamplingParams] = []
        self.full = 2
        self.open = self.most_open = 0
        self.made.append(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.open == 0

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        return "chat:" + messages[-1]["content"]

    def generate_parsed(self, prompt: str, params: SamplingParams) -> AsyncIterator[Any]:
        return self.generate(prompt, params)

    async def generate(self, prompt: str, params: SamplingParams) -> AsyncIterator[Any]:
        self.params.append(params)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(0.05 / len(self.params))
            if prompt == "crowd" and self.full:
                self.full -= 1
                raise QueueFull("full")
            if prompt == "long":
                raise ContextLengthExceeded("too long", param="prompt")
            choices = [SimpleNamespace(text=f"{prompt.upper()}{index}", finish_reason="stop", token_ids=[1, 2]) for index in range(params.n)]
            yield SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=choices)
        finally:
            self.open -= 1


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLLM]:
    monkeypatch.setattr(async_llm, "AsyncLLM", ScriptedLLM)
    monkeypatch.setattr("headrace.cli.generate.RETRY_SECONDS", 0.001)
    ScriptedLLM.made = []
    return ScriptedLLM


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_text_file(llm: type[ScriptedLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("one\n\ntwo\nthree\nfour\nfive\n")
    assert main(["generate", str(tmp_path / "in.txt"), "--model", "m", "--temperature", "0", "--seed", "7", "-n", "2"]) == 0
    out = answers(capsys.readouterr().out)
    assert [(line["index"], line["choices"][1]["text"]) for line in out] == list(enumerate(["ONE1", "TWO1", "THREE1", "FOUR1", "FIVE1"]))
    assert out[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}
    [made] = llm.made
    assert (made.model, made.options) == ("m", {"seed": 7})
    assert (made.params[0].temperature, made.params[0].max_tokens, made.params[0].n) == (0.0, 256, 2)
    assert made.most_open == 4  # twice max_num_seqs, not all at once


def test_errors_stay_on_their_line(llm: type[ScriptedLLM], tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "id": "first", "params": {"max_tokens": 3, "logit_bias": {"5": 1.0}}}',
        "{broken",
        '{"prompt": "long", "id": 2}',
        '{"prompt": "a", "colour": "red"}',
        '{"messages": [{"role": "user", "content": "b"}]}',
        '{"prompt": "a", "params": {"temperature": -1}}',
        '{"prompt": "crowd"}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    assert main(["generate", str(tmp_path / "in.jsonl"), "--output", str(output)]) == 1
    out = answers(output.read_text())
    assert [line["index"] for line in out] == list(range(7))
    assert (out[0]["id"], out[0]["choices"][0]["text"]) == ("first", "A0")
    assert "not JSON" in out[1]["error"]["message"]
    assert (out[2]["id"], out[2]["error"]["code"]) == (2, "context_length_exceeded")
    assert out[3]["error"]["param"] == "colour"
    assert out[4]["choices"][0]["text"] == "CHAT:B0"
    assert out[5]["error"]["param"] == "temperature"
    assert out[6]["choices"][0]["text"] == "CROWD0"


def test_stdin_and_chat(llm: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["generate", "--chat", "--stop", "x", "--stop", "y"]) == 0
    assert answers(capsys.readouterr().out)[0]["choices"][0]["text"] == "CHAT:HELLO0"
    assert llm.made[0].params[0].stop == ("x", "y")


def test_resume(llm: type[ScriptedLLM], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    output = tmp_path / "out.jsonl"
    arguments = ["generate", str(tmp_path / "in.txt"), "--output", str(output)]
    assert main(arguments) == 0
    whole = output.read_text()
    output.write_text(whole[: whole.index("\n") + 9])  # cut off in the second line
    assert main([*arguments, "--resume"]) == 0
    assert output.read_text() == whole
    assert len(llm.made[1].params) == 2
    assert main([*arguments, "--resume"]) == 0
    assert len(llm.made) == 2  # nothing left: no engine is started
    assert main(arguments) == 0
    assert output.read_text() == whole


def test_output_that_cannot_be_written(llm: type[ScriptedLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    assert main(["generate", str(tmp_path / "in.txt"), "--output", str(tmp_path / "none" / "out")]) == 2
    assert "--output" in capsys.readouterr().err


def test_interrupt_leaves_whole_lines(llm: type[ScriptedLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(self: ScriptedLLM, prompt: str, params: SamplingParams) -> AsyncIterator[Any]:
        if prompt == "two":
            raise asyncio.CancelledError
        yield SimpleNamespace(prompt_token_ids=[1], outputs=[])

    monkeypatch.setattr(ScriptedLLM, "generate", interrupted)
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    output = tmp_path / "out.jsonl"
    with contextlib.suppress(asyncio.CancelledError):
        main(["generate", str(tmp_path / "in.txt"), "--output", str(output)])
    assert [line["index"] for line in answers(output.read_text())] == [0]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("[1]", "JSON object"),
        ("{}", "prompt or messages"),
        ('{"prompt": "a", "messages": []}', "not both"),
        ('{"prompt": 3}', "prompt must be a text"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": ["a"]}', "messages must be a list"),
        ('{"prompt": "a", "params": 1}', "params must be an object"),
        ('{"prompt": "a", "params": {"top_q": 1}}', "top_q"),
        ('{"prompt": "a", "params": {"stop": 5}}', "wrong type"),
        ('{"prompt": "a", "params": {"logit_bias": {"x": 1}}}', "logit_bias must have token ids"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines(body: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        parse_line(Line(text=body, is_json=True), {}, chat=False)


def test_form_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "b.txt").write_text("x\u2028y\r\n  \n")
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    assert [line.is_json for line in read_lines(files, "auto")] == [True, False]
    assert [line.is_json for line in read_lines(files, "text")] == [False, False]
    assert parse_line(read_lines(files, "auto")[1], {}, chat=False).prompt == "x\u2028y"
