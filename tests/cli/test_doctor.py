from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.doctor import machine, placement
from tests.doctor.test_machine import HEALTHY
from tests.doctor.test_placement import ALONE
from tests.server.fakes import write_model
from tests.server.test_serve import Process


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_machine", lambda: HEALTHY)
    monkeypatch.setattr(placement, "read_placement", lambda: ALONE)


@pytest.mark.usefixtures("facts")
def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("13 checks, all is well.\n")


def test_a_fault_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(machine, "read_machine", lambda: replace(HEALTHY, compiler=None))
    monkeypatch.setattr(placement, "read_placement", lambda: ALONE)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("! compiler: there is no C++ compiler on the PATH\n    remedy: install g++")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [finding["check"] for finding in found if not finding["ok"]] == ["compiler"]


@pytest.mark.usefixtures("facts")
def test_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    process = Process(write_model(tmp_path))
    try:
        process.wait_ready()
        assert main(["doctor", process.url, "--json", "--profile", "0.1"]) == 0
    finally:
        process.kill()
    checks = {finding["check"] for finding in json.loads(capsys.readouterr().out)}
    assert {"compiler", "ready", "recompiles", "time", "prefix-cache", "kv-fragmentation", "copies", "syncs"} <= checks
    assert main(["doctor", "http://127.0.0.1:1"]) == 1
    assert "Is a server running there?" in capsys.readouterr().err


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doubled_module.py").write_text("import torch\n\ndef factory():\n    return torch.nn.Linear(2, 2), [(torch.ones(1, 2),)]\n")
    assert main(["doctor", "module", "doubled_module:factory"]) == 0
    assert "4 checks, all is well." in capsys.readouterr().out


def test_a_profile_is_bounded(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["doctor", "http://a", "--profile", "11"])
    assert "at most 10" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["module"], ["module", "a", "b"], ["http://a", "http://b"]])
def test_other_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["doctor", *words])
    assert "PACKAGE.MODULE:FACTORY" in capsys.readouterr().err
