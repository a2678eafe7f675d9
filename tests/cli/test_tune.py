"""The verb against real serving processes on the fake runner, whose steps take a known time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import tune_axes
from headrace.cli.main import main
from headrace.cli.settings import read_config_file
from headrace.plan.slo import parse_slo
from tests.server.fakes import write_model


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Twelve requests of eight steps of 20 ms: the more at once the better."""
    monkeypatch.setattr("headrace.cli.tune_trial.RECORD_S", 0.5)
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model", eos_every=0, step_seconds=0.02)
    files = ["--output", str(tmp_path / "tuned.yaml"), "--state", str(tmp_path / "trials.json"), "--json", str(tmp_path / "tune.json")]
    files += ["--html", str(tmp_path / "tune.html")]
    load = ["--trace", "burst:prompt=8,output=8,requests=12", "--runner-factory", "tests.server.fakes:make_runner"]
    return ["tune", str(model), *files, *load]


def test_the_best_settings_are_written_and_a_stopped_search_goes_on(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--search", "max-num-seqs=3", "--time-budget", "1s"]) == 0, "one trial is always made"
    words += ["--search", "max-num-seqs=1,12", "--search", "block-size=16"]
    first = json.loads((tmp_path / "trials.json").read_text())["trials"]
    assert len(first) == 1
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "use it with: headrace serve --config" in out
    trials = json.loads((tmp_path / "trials.json").read_text())["trials"]
    assert trials[0] == first[0], "what was tried is not tried again"
    assert [trial["settings"]["max-num-seqs"] for trial in trials] == [3, 12, 1]
    tuned = read_config_file(str(tmp_path / "tuned.yaml"))
    assert (tuned["max-num-seqs"], tuned["runner-factory"]) == (12, "tests.server.fakes:make_runner")
    found = json.loads((tmp_path / "tune.json").read_text())
    assert found["best"]["settings"] == {"max-num-seqs": 12, "block-size": 16}
    assert len(found["trials"]) == 2, "the first search had other settings"
    assert found["best"]["score"] == max(trial["score"] for trial in trials)
    assert main([*words, "--time-budget", "1s"]) == 0, "all that it wants to try is there"
    assert len(json.loads((tmp_path / "trials.json").read_text())["trials"]) == 3
    assert "<- best" in out
    page = (tmp_path / "tune.html").read_text()
    assert "<svg" in page
    assert "max-num-seqs 12" in page


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--trace", "poisson:rate=3,prompt=4,output=4"], "--slo is needed"),
        (["--search", "threads=1,2", "--threads", "2"], "There is nothing to search"),
        (["--search", "max-num-seqs=64", "--max-num-batched-tokens", "8"], "do not go together"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_tuned_is_named(words: list[str], more: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *more]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("text", ["max-num-seqs", "speed=1,2", "max-num-seqs=fast", "scheduling-policy=lifo"])
def test_axes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"use|is one of"):
        tune_axes.parse_axis(text)


def test_axes() -> None:
    axis = tune_axes.parse_axis("--max-num-seqs=16,4,8")
    assert (axis.name, axis.values, axis.ordered) == ("max-num-seqs", (4, 8, 16), True)
    off, on = tune_axes.parse_axis("speculative-config=default"), tune_axes.parse_axis('speculative-config={"num_speculative_tokens": 2}')
    [both] = tune_axes.merged([off, on])
    assert both.values[0] is None
    assert both.values[1]["num_speculative_tokens"] == 2
    assert not both.ordered
    names = [axis.name for axis in tune_axes.default_axes(parse_slo("p95_itl=50ms"))]
    assert names[0] == "max-num-seqs"
    assert "target-itl-ms" in names
    assert tune_axes.start_value(tune_axes.parse_axis("max-num-seqs=16,64")) == 64
