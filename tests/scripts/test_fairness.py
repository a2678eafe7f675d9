"""The arithmetic of the measurement, and a short one of the real thing."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts.load_script import load_script
from tests.server.fakes import write_model


@pytest.fixture(scope="module")
def fairness() -> ModuleType:
    return load_script("fairness")


def test_the_index_of_fairness(fairness: ModuleType) -> None:
    assert fairness.jain([5, 5]) == 1
    assert fairness.jain([1, 0]) == 0.5


def test_arrivals_are_the_same_each_time_and_as_many_as_asked_for(fairness: ModuleType) -> None:
    shapes = [fairness.Shape(1, 2), fairness.Shape(3, 4)]
    coming = fairness.arrivals_of(shapes, rate=4.0, count=400, seed=1)
    assert coming == fairness.arrivals_of(shapes, rate=4.0, count=400, seed=1)
    assert coming[-1][0] == pytest.approx(100, rel=0.2)
    assert {shape for _, shape in coming} == set(shapes)


def test_a_server_of_its_own_needs_no_keys_and_another_one_does(fairness: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fairness.main(["--url", "http://127.0.0.1:9", "--light-key", "a"])
    assert "--heavy-key" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="does not start"):
        fairness.main(["--", "/no/such.gguf"])


def test_a_short_measurement(fairness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path, max_model_len=2048, num_blocks=1000, eos_every=0, step_seconds=0.002)
    options = {"rate": 10, "requests": 8, "prompt": 16, "answer": 4, "lead": 0.3, "backlog": 4, "settle": 0.3, "window": 1, "vocab": 256}
    load = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    status = fairness.main([*load, "--", str(model), "--runner-factory", "tests.server.fakes:make_runner"])
    text = capsys.readouterr().out
    assert text.count("TTFT p50") == 2
    slowdown, jain = (float(re.search(pattern, text)[1]) for pattern in (r"beside / alone: ([\d.]+)", r"Jain's index: ([\d.]+)"))  # type: ignore[index]
    if abs(slowdown - fairness.MAX_SLOWDOWN) > 0.01 and abs(jain - fairness.MIN_JAIN) > 0.001:  # as printed they are rounded
        assert status == int(slowdown > fairness.MAX_SLOWDOWN or jain < fairness.MIN_JAIN)
