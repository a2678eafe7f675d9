"""The soak client's arithmetic, and a short soak of the real thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.scripts.load_script import load_script


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return load_script("soak")


def test_slope(soak: ModuleType) -> None:
    memory, warming = soak.Memory(), soak.Memory()
    for second in range(200):
        memory.add(float(second), {"HTTP": 100.0 + second / 60, "engine": 400 + 2 * second / 60})
        warming.add(float(second), {"engine": 500.0 + min(second, 50)})
    assert memory.slope(0) == pytest.approx(3.0)
    assert memory.slope(100) == pytest.approx(3.0)
    assert memory.slope(100, "engine") == pytest.approx(2.0)
    assert memory.slope(150) is None  # too short to say
    assert warming.slope(50) == pytest.approx(0.0)
    assert warming.slope(0) > 1


def test_memory_of_each_process(soak: ModuleType) -> None:
    memory = soak.Memory()
    memory.add(0.0, {"HTTP": 100.0, "engine": 400.0})
    memory.add(1.0, {"HTTP": 110.0, "engine": 450.0, "grammar worker": 90.0})
    memory.add(2.0, {"HTTP": 110.0, "engine": 430.0})
    assert memory.names() == ["HTTP", "engine", "grammar worker"]
    assert memory.summary(0.0) == {"first": 500.0, "last": 540.0, "most": 650.0, "MiB/min": None}
    assert memory.of("grammar worker") == [0.0, 90.0, 0.0]


def test_names_of_processes(soak: ModuleType) -> None:
    assert soak.name_of(["python", "-m", "headrace", "serve", "--port", "0"]) == "HTTP"
    assert soak.name_of(["python", "-m", "headrace.engine.engine_host", "7"]) == "engine"
    assert soak.name_of(["python", "-m", "headrace.text.grammar_worker"]) == "grammar worker"


@pytest.fixture
def ended(soak: ModuleType) -> Any:
    """A soak that has seen nothing but one good answer."""
    args, _ = soak.parse_arguments(["--duration", "240"])
    found = soak.Soak(args, "http://127.0.0.1:9", None)
    found.tally.statuses[200] = 1
    for second in range(240):
        found.memory.add(float(second), {"HTTP": 100.0})
    return found


def at_rest(soak: ModuleType) -> dict[str, float]:
    return {**dict.fromkeys(soak.AT_REST, 0.0), "headrace_engine_restarts_total": 0.0}


def test_a_good_end(soak: ModuleType, ended: Any) -> None:
    found = soak.report(ended, at_rest(soak), 60.0)
    assert len(found["verdicts"]) == 8
    assert all(found["verdicts"].values())
    assert found["memory MiB"]["all"]["MiB/min"] == pytest.approx(0.0)


FAULTS: dict[str, Callable[[Any, dict[str, float]], object]] = {
    "no response >= 500": lambda soak, metrics: soak.tally.statuses.update({503: 1}),
    "nothing stuck": lambda soak, metrics: setattr(soak.tally, "stuck", 1),
    "nothing broken": lambda soak, metrics: soak.tally.broken.update({"ReadError": 1}),
    "good requests all served": lambda soak, metrics: soak.tally.refused.update({400: 1}),
    "malformed all refused": lambda soak, metrics: setattr(soak.tally, "malformed_accepted", 1),
    "all blocks free": lambda soak, metrics: metrics.update({"headrace_kv_cache_usage_perc": 0.01}),
    "no engine restart": lambda soak, metrics: metrics.update({"headrace_engine_restarts_total": 1.0}),
    "memory slope < 1 MiB/min": lambda soak, metrics: [sample.update(HTTP=100 + index / 50) for index, sample in enumerate(soak.memory.mib)],
}


@pytest.mark.parametrize("verdict", FAULTS)
def test_each_verdict_can_fail(soak: ModuleType, ended: Any, verdict: str) -> None:
    metrics = at_rest(soak)
    FAULTS[verdict](ended, metrics)
    failed = [name for name, met in soak.report(ended, metrics, 60.0)["verdicts"].items() if not met]
    assert failed == [verdict]


@pytest.mark.parametrize("nothing", ["no answer", "no memory"])
def test_what_was_not_seen_is_no_success(soak: ModuleType, ended: Any, nothing: str) -> None:
    if nothing == "no answer":
        ended.tally.statuses.clear()
        assert not soak.report(ended, at_rest(soak), 60.0)["verdicts"]["good requests all served"]
    else:
        ended.memory = soak.Memory()
        assert "memory slope < 1 MiB/min" not in soak.report(ended, at_rest(soak), 60.0)["verdicts"]


@pytest.mark.parametrize(
    ("status", "content", "stream", "seen"),
    [
        (200, b"data: {}\n\ndata: [DONE]\n\n", True, {}),
        (200, b"data: {}\n\n", True, {"broken": {"stream without its end": 1}}),
        (200, b'data: {"error": 1}\n\ndata: [DONE]\n\n', True, {"broken": {"error event in a stream": 1}}),
        (200, b'{"usage": {"completion_tokens": 5}}', False, {"tokens": 5}),
        (429, b"{}", False, {}),
        (400, b"{}", False, {"refused": {400: 1}}),
    ],
)
def test_answers_are_judged(soak: ModuleType, ended: Any, status: int, content: bytes, stream: bool, seen: dict[str, object]) -> None:
    ended._judge({"stream": stream}, httpx.Response(status), content)
    tally = ended.tally
    assert tally.statuses[status] >= 1
    assert (tally.broken, tally.refused, tally.tokens) == (seen.get("broken", {}), seen.get("refused", {}), seen.get("tokens", 0))


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
