"""The verb against a real serving process on the fake runner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.server.fakes import write_model
from tests.server.test_serve import Process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("server")
    process = Process(write_model(folder / "model"), "--batch-dir", str(folder / "batches"), "--api-key", "sk-1")
    try:
        process.until(lambda: process.status("/ready") == 200, 60)
        yield process
    finally:
        process.kill()


def write(path: Path, *temperatures: float) -> Path:
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3, "temperature": temperature}}
        for i, temperature in enumerate(temperatures)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_from_a_file_to_its_answers(server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HEADRACE_API_KEY", "sk-1")
    monkeypatch.setattr("headrace.cli.batch.POLL_S", 0.05)
    output = tmp_path / "out.jsonl"
    assert main(["batch", "run", str(write(tmp_path / "in é.jsonl", 0, 0, 0)), "--output", str(output), "--url", server.url]) == 0
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["c0", "c1", "c2"]
    assert "completed: 3 of 3 lines answered" in capsys.readouterr().err

    assert main(["batch", "submit", str(write(tmp_path / "in.jsonl", 0, -1)), "--url", server.url]) == 0
    batch_id = capsys.readouterr().out.strip()
    assert main(["batch", "result", batch_id, "--output", str(output), "--url", server.url]) == 1
    assert [json.loads(line)["response"]["status_code"] for line in output.read_text().splitlines()] == [200, 400]
    assert main(["batch", "status", batch_id, "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"
    assert main(["batch", "cancel", batch_id, "--url", server.url]) == 1
    assert "cannot be cancelled" in capsys.readouterr().err


def test_what_goes_wrong_is_said(server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    file = write(tmp_path / "in.jsonl", 0)
    for arguments, status, words in (
        (["submit", str(tmp_path / "none"), "--url", server.url], 2, "cannot be read"),
        (["submit", str(tmp_path / "text"), "--url", server.url], 2, "the first line"),
        (["submit", str(file), "--url", server.url], 1, "401"),
        (["submit", str(file), "--url", "http://127.0.0.1:9"], 1, "does not answer"),
        (["submit", str(file), "--url", "ftp://x"], 1, "not a URL"),
        (["status", "batch_nope", "--url", server.url, "--api-key", "sk-1"], 1, "no batch"),
    ):
        (tmp_path / "text").write_text("hello\n")
        assert main(["batch", *arguments]) == status
        assert words in capsys.readouterr().err

    file.write_text(file.read_text() + "\n{broken")
    assert main(["batch", "run", str(file), "--url", server.url, "--api-key", "sk-1", "--output", str(tmp_path / "out")]) == 1
    assert "line 2: " in capsys.readouterr().err
