"""The verb: against a real serving process on the fake runner, and for devices that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.server.fakes import write_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
TRACE = "poisson:rate=10,prompt=10,output=6,requests=30"


def plan(*words: str) -> int:
    return main(["plan", *words])


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A model of which only the config is here."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("headrace.cli.plan_engine.LEVEL_S", 0.5)
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model", eos_every=0, step_seconds=0.01)
    costs = tmp_path / "costs.json"
    words = ["--trace", TRACE, "--model", str(model), "--step-costs", str(costs), "--runner-factory", "tests.server.fakes:make_runner", "--json"]
    assert plan(*words, "--max-num-seqs", "4", "--slo", "p95_e2el=60s") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["replicas"] == 1
    assert found["figures"]["completed"] == 30
    assert found["figures"]["median_itl_ms"] >= 10.0
    assert found["trace"]["requests"] == 30
    assert any("measured steps" in line for line in found["assumptions"])
    before = costs.read_bytes()
    assert plan(*words, "--max-num-seqs", "1", "--replicas", "2", "--price", "2") == 0, "of the scheduler's settings others can be planned"
    found = json.loads(capsys.readouterr().out)
    assert (found["figures"]["replicas"], found["cost"]["per_hour"]) == (2, 4.0)
    assert costs.read_bytes() == before
    assert plan(*words, "--threads", "1") == 2
    assert "was measured of" in capsys.readouterr().err


def test_a_device_that_is_not_here(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", "poisson:rate=20,prompt=500,output=20,requests=100", "--model", llama, "--device", "a100-80gb"]
    assert plan(*words, "--slo", "p95_ttft=1s", "--price", "2") == 0
    out = capsys.readouterr().out
    assert "not measured here" in out
    assert "keep" in out
    assert "Cost:" in out
    assert plan(*words, "--slo", "p95_ttft=1ms") == 1
    assert "keeps p95_ttft=1ms: one request alone takes longer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "t4", "--max-model-len", "4096"], "Lower --max-model-len"),
        (["--device", "h100", "--threads", "3"], "--threads has no meaning"),
        (["--device", "h100", "--swap-space", "4"], "--swap-space cannot be planned"),
        (["--device", "h100", "--speculative-config", "{}"], "--speculative-config cannot be planned"),
        (["--device", "h100", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["--step-costs", "{model}/config.json"], "holds no measured steps"),
    ],
)
def test_what_cannot_be_planned_is_named(words: list[str], named: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.replace("{model}", llama) for word in words]
    assert plan("--trace", TRACE, "--model", llama, *words) == 2
    assert named in capsys.readouterr().err


def test_limits_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan("--trace", TRACE, "--slo", "fast")
    assert "p95_ttft=300ms" in capsys.readouterr().err
