"""The verb against a real serving process on the fake runner, and the picture alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

from headrace.cli.main import main
from headrace.cli.top import picture
from headrace.observe.work import KINDS
from tests.server.fakes import write_model
from tests.server.test_serve import Process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(write_model(tmp_path_factory.mktemp("model"), eos_every=0, step_seconds=0.01), "--api-key", "sk-1")
    try:
        process.until(lambda: process.status("/ready") == 200, 60)
        yield process
    finally:
        process.kill()


def test_one_picture(server: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HEADRACE_API_KEY", "sk-1")
    body = {"prompt": "abc", "max_tokens": 20}
    httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": "Bearer sk-1"}, timeout=60).raise_for_status()
    assert main(["top", server.url, "--once", "--interval", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "KV blocks" in out
    assert all(f"\n{kind} " in out for kind in KINDS)
    assert "\x1b" not in out, "not a terminal"
    assert main(["top", server.url, "--once", "--json"]) == 0
    work = json.loads(capsys.readouterr().out)["engine"]["work_seconds_total"]
    assert work["useful"] > 0.1, "twenty steps of 10 ms"


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert main(["top", "http://127.0.0.1:1", "--once"]) == 1
    assert "Is a server running there?" in capsys.readouterr().err


def answer(at: float, tokens: int, **work: float) -> dict[str, Any]:
    engine = {
        "at": at,
        "running": 3,
        "waiting": 1,
        "swapped": 0,
        "kv_blocks": {"total": 10, "used": 6, "cached": 3, "free": 1},
        "generation_tokens_total": tokens,
        "prompt_tokens_total": 0,
        "steps_total": 4,
        "work_seconds_total": dict.fromkeys(KINDS, 0.0) | work,
        "remarks": [{"kind": "host", "share": 0.3, "text": "30% of busy time is work around the model."}],
    }
    return {"model": "tiny", "state": "ready", "version": "1", "max_num_seqs": 16, "engine": engine}


def test_shares_and_rates_are_those_of_the_interval():
    before, now = answer(10.0, 100, useful=5.0, idle=3.0), answer(12.0, 150, useful=6.5, idle=3.5)
    lines = picture(before, now, width=100).splitlines()
    assert "requests   3 of 16 running, 1 waiting, 0 swapped out" in lines
    assert any("25.0 tokens out/s" in line for line in lines)
    (useful,) = [line for line in lines if line.startswith("useful")]
    assert "75.0%" in useful
    assert useful.count("#") == 30
    assert lines[-1] == "30% of busy time is work around the model."


def test_an_engine_that_has_started_since_is_shown_from_its_start():
    restarted = answer(50.0, 30, useful=1.0, idle=1.0)
    old = deepcopy(restarted)
    old["engine"] = None
    assert "15.0 tokens out/s" in picture(old, restarted)
    assert "50.0%" in picture(old, restarted)
    assert "has computed nothing yet" in picture(restarted, old)
