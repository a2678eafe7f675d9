from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.models import hub, store
from headrace.models.hub import HubModel


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "cached_models", lambda: [HubModel(name="owner/model", path=tmp_path / "hub", size=2_000_000)])
    return tmp_path


def test_list(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(store.DEFAULT_MODEL)
    assert "not fetched yet (default)" in lines[0]
    assert lines[1].split() == ["owner/model", "2.0", "MB", "hub", str(home / "hub")]


def test_list_as_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"name": store.DEFAULT_MODEL, "path": None, "size": 98362432, "source": "package"}
    assert second["path"] == str(home / "hub")


def test_pull_show_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": {"rope_theta": 1.0}}))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert main(["models", "pull", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)
    assert main(["models", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "model_type: llama" in shown
    assert 'rope_parameters: {"rope_theta": 1.0}' in shown
    assert main(["models", "verify", str(tmp_path)]) == 0
    assert "structure is whole" in capsys.readouterr().out
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert main(["models", "verify", str(tmp_path)]) == 1
    assert "model.safetensors is torn" in capsys.readouterr().err
