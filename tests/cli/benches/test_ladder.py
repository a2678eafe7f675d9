"""The verb with real servers of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.benches.processes import peak_memory
from headrace.cli.main import main
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.runner.tiny_model import save_tiny_llama


def test_two_rungs_and_their_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tmp_path / "tiny"
    save_tiny_llama(model, vocab_size=300, max_position_embeddings=512)
    write_byte_tokenizer(model)
    load = ["--clients", "3", "--num-prompts", "6", "--input-len", "4", "--output-len", "4", "--shared-context", "20"]
    files = ["--json", str(tmp_path / "ladder.json"), "--html", str(tmp_path / "ladder.html")]
    assert (
        main(
            [
                "bench",
                "ladder",
                str(model),
                *load,
                "--shared-requests",
                "2",
                "--rungs",
                "dynamic,prefix-cache",
                "--threads",
                "1",
                "--rounds",
                "2",
                *files,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "1. dynamic batching" in out
    assert "2. continuous + prefix cache" in out
    assert "note: " in out
    found = json.loads((tmp_path / "ladder.json").read_text())
    assert (found["format"], found["model"]) == ("headrace-ladder-1", "tiny")
    dynamic, cached = found["rungs"]
    for rung in (dynamic, cached):
        assert (rung["figures"]["completed"], rung["figures"]["failed"], rung["shared_context"]["errors"]) == (12, 0, [])
        assert len(rung["shared_context"]["ttfts_ms"]) == 6
        assert len(rung["rounds"]) == 2
        assert rung["work"]["useful"] > 0.0
        assert 0.0 < rung["useful_share"] <= 1.0
        if sys.platform == "linux":
            assert rung["peak_memory_bytes"] > 1 << 20
    assert dynamic["figures"]["total_output_tokens"] == cached["figures"]["total_output_tokens"]
    assert dynamic["figures"]["total_input_tokens"] == cached["figures"]["total_input_tokens"]
    assert cached["over_base"]["request_throughput"] is None, "its base did not run"
    assert cached["over_lowest"]["request_throughput"] > 0.0
    assert "<h1>The ladder</h1>" in (tmp_path / "ladder.html").read_text()


def test_a_rung_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_tiny_llama(tmp_path)
    assert main(["bench", "ladder", str(tmp_path), "--rungs", "naive,graphs"]) == 2
    assert "--rungs: there is no rung graphs here" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_process_and_its_children():
    script = "import subprocess, sys; data = bytearray(64 << 20); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE) as process:
        from tests.patience import until

        until(lambda: (peak_memory(process.pid) or 0) > 64 << 20)
        process.communicate()
    assert peak_memory(process.pid) is None
    assert (peak_memory(os.getpid()) or 0) > 1 << 20
