"""The soak client's arithmetic, and a short soak of the real thing."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts.load_script import load_script


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return load_script("soak")


def test_slope(soak: ModuleType) -> None:
    at = [float(second) for second in range(200)]
    memory = soak.Memory(at=at, mib=[500 + 3 * second / 60 for second in at])
    assert memory.slope(0) == pytest.approx(3.0)
    assert memory.slope(100) == pytest.approx(3.0)
    assert memory.slope(150) is None  # too short to say
    warming = soak.Memory(at=at, mib=[500 + min(second, 50) for second in at])
    assert warming.slope(50) == pytest.approx(0.0)
    assert warming.slope(0) > 1


def test_metrics_are_summed(soak: ModuleType) -> None:
    text = '# HELP a b\na{x="1"} 2.0\na{x="2"} 3\nb 4e1\n'
    assert soak.read_metrics(text) == {"a": 5.0, "b": 40.0}


def test_arguments(soak: ModuleType) -> None:
    args, serve = soak.parse_arguments(["--clients", "3", "--", "--max-num-seqs", "2"])
    assert (args.clients, args.duration, serve) == (3, 600.0, ["--max-num-seqs", "2"])


def test_malformed_bodies_are_many(soak: ModuleType) -> None:
    assert len(set(soak.MALFORMED)) == len(soak.MALFORMED) >= 10


def test_server_that_does_not_start(soak: ModuleType) -> None:
    with pytest.raises(SystemExit, match="There is no model at /no/such"):
        soak.main(["--duration", "1", "--", "/no/such.gguf"])


@pytest.mark.real_model
@pytest.mark.slow
def test_short_soak(soak: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks are few, so that requests are preempted too."""
    options = {"duration": 6, "clients": 12, "malformed": 0.2, "max-prompt": 60, "max-output": 24, "patience": 120, "seed": 3}
    load = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    serve = ["--max-model-len=512", "--num-gpu-blocks-override=48", "--max-num-seqs=8", "--swap-space=64MiB"]
    report_file = tmp_path / "report.json"
    status = soak.main([*load, "--json", str(report_file), "--", *serve])
    report = json.loads(report_file.read_text())
    assert status == 0, report
    assert report["statuses"]["200"] > 0
    assert report["statuses"]["400"] > 0
    assert report["cancelled"] > 0
