"""The plain decoder against transformers, and the verb around scripted processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.inside.eager_compiled import Spec, measure
from headrace.bench.inside.plain_decoder import PlainDecoder
from headrace.cli.benches import eager_compiled
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.models.loader import load_model
from tests.models.tiny_models import make
from tests.runner.tiny_model import save_tiny_llama


def test_the_plain_decoder_computes_what_transformers_does(tmp_path: Path):
    reference = save_tiny_llama(tmp_path)
    decoder = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        model = PlainDecoder(decoder, rows=3, length=12)
        ids_BT = torch.arange(36).view(3, 12)
        prefilled = model(ids_BT[:, :9], torch.arange(9))
        decoded = [model(ids_BT[:, i : i + 1], torch.tensor([i])) for i in range(9, 12)]
        expected = reference(ids_BT).logits
    torch.testing.assert_close(prefilled, expected[:, 8], rtol=1e-4, atol=1e-4)
    for i, logits in enumerate(decoded, start=9):
        torch.testing.assert_close(logits, expected[:, i], rtol=1e-4, atol=1e-4)


def test_it_is_one_graph(tmp_path: Path):
    """Traced without a compiler: a break would raise."""
    save_tiny_llama(tmp_path)
    decoder = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        model = PlainDecoder(decoder, rows=1, length=4)
        arguments = (torch.zeros(1, 1, dtype=torch.int64), torch.tensor([2]))
        eager = model(*arguments)
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")(*arguments)
    torch.testing.assert_close(compiled, eager)


def test_a_model_that_needs_more_is_refused(tmp_path: Path):
    make("Gemma2Config", {}).save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="sliding windows"):
        PlainDecoder(decoder, rows=1, length=4)


@pytest.mark.parametrize(("workload", "items"), [("decode", 2), ("prefill", 5)])
def test_what_is_measured(tmp_path: Path, workload: Any, items: int):
    save_tiny_llama(tmp_path)
    spec = Spec(workload=workload, dtype="bfloat16", compiled=False, model=str(tmp_path), rows=2, context=7, prompt_tokens=5, repeats=3)
    found = measure(spec)
    assert (found.items, len(found.latencies_ms)) == (items, 3)
    assert found.items_per_second == pytest.approx(1e3 * items / found.latency_ms)
    assert found.latency_ms == sorted(found.latencies_ms)[1]
    assert found.peak_memory_bytes > 1 << 20


def test_the_verb_compares_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    specs: list[dict[str, Any]] = []

    def run(command: list[str], **rest: Any) -> subprocess.CompletedProcess[str]:
        specs.append(spec := json.loads(command[-1]))
        milliseconds = 5.0 if spec["compiled"] else 10.0
        found = {"first_seconds": 2.0, "latency_ms": milliseconds, "latencies_ms": [milliseconds], "items": 4, "items_per_second": 4e3 / milliseconds}
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps(found | {"peak_memory_bytes": 8 << 20}), "")

    monkeypatch.setattr(eager_compiled.subprocess, "run", run)
    words = ["--workloads", "resnet50", "--dtypes", "float32,bfloat16", "--images", "4", "--json", str(tmp_path / "e.json"), "--device", "cpu"]
    assert main(["bench", "eager-vs-compiled", *words]) == 0
    assert [(spec["dtype"], spec["compiled"], spec["model"]) for spec in specs] == [
        (dtype, compiled, None) for dtype in ("float32", "bfloat16") for compiled in (False, True)
    ]
    Spec(**specs[0])  # all of it is known on the other side
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resnet50   float32")]
    assert line.split()[2:] == ["10.0", "5.0", "2.00", "400.0", "800.0", "8", "8", "2.0", "4", "images"]
    assert len(json.loads((tmp_path / "e.json").read_text())["results"]) == 4


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(eager_compiled.subprocess, "run", lambda command, **rest: subprocess.CompletedProcess(command, 1, "", "no compiler\n"))
    assert main(["bench", "eager-vs-compiled", "--workloads", "resnet50", "--dtypes", "float32", "--device", "cpu"]) != 0
    assert "resnet50 in float32 does not run: no compiler" in capsys.readouterr().err


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(eager_compiled.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "eager-vs-compiled", "--workloads", "vit-large"]) == 2
    assert "headrace[vision]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "eager-vs-compiled", "--workloads", "vgg"])
    assert "vgg is not known; use decode" in capsys.readouterr().err
