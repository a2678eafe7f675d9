from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.tune_axes import parse_axis
from tests.scripts.load_script import load_script

tune_grid = load_script("tune_grid")
AXES = [parse_axis("max-num-seqs=1,2"), parse_axis("max-num-batched-tokens=128,512")]
TRACE = "burst:prompt=4,output=4,requests=2"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of trials, whose score is the number of sequences, twice that in the second repeat and later: the machine became faster."""
    found: list[dict[str, Any]] = []

    class FakeTrials:
        def __init__(self, *things: object, end: float, record: bool) -> None:
            assert not record

        def __enter__(self) -> FakeTrials:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def score(self, settings: dict[str, Any], best: float) -> float:
            found.append(settings)
            return float(settings["max-num-seqs"]) * (2.0 if len(found) > 4 else 1.0)

    monkeypatch.setattr(tune_grid, "Trials", FakeTrials)
    return found


def always() -> float:
    return float("inf")


def test_every_repeat_is_the_whole_grid_in_an_order_of_its_own(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    state = tune_grid.State(tmp_path / "state.json", "load")
    tune_grid.measure_grid(AXES, TRACE, "", state, 3, always)
    repeats = [made[i : i + 4] for i in (0, 4, 8)]
    for repeat in repeats:
        assert sorted(map(tune_grid.named, repeat)) == sorted(map(tune_grid.named, tune_grid.combinations(AXES)))
    assert repeats[0] != repeats[1]
    assert tune_grid.relative(state.found["scores"])["max-num-batched-tokens 512, max-num-seqs 2"] == pytest.approx([4 / 3] * 3)


def test_a_part_that_is_over_goes_on_where_it_was(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    def for_trials(count: int) -> Callable[[], float]:
        return lambda: 1000.0 if len(made) < count else 0.0

    with pytest.raises(tune_grid.PartOver):
        tune_grid.measure_grid(AXES, TRACE, "", tune_grid.State(tmp_path / "state.json", "load"), 2, for_trials(3))
    tune_grid.measure_grid(AXES, TRACE, "", tune_grid.State(tmp_path / "state.json", "load"), 2, always)
    assert len(made) == 8, "no trial was made again"
    other = tune_grid.State(tmp_path / "state.json", "another load")
    assert other.found["scores"] == []
    other.save()
    assert len(tune_grid.State(tmp_path / "state.json", "load").found["scores"]) == 2


def test_a_choice_is_set_beside_the_best_of_its_own_repeat() -> None:
    """However fast the machine was at a time; and the table says how far repeats lie apart."""
    scores = [{"a": 10.0, "b": 9.8, "c": 5.0}, {"a": 20.0, "b": 19.0, "c": 10.0}, {"a": 30.0, "b": 29.1, "c": 15.0}]
    assert tune_grid.share_of_best(scores, "b") == pytest.approx(0.97)
    assert tune_grid.share_of_best(scores, "a") == 1.0
    shown = tune_grid.table(scores, "b").splitlines()
    assert [line.split()[0] for line in shown[1:4]] == ["a", "b", "c"]
    assert "best" in shown[1]
    assert "tune's choice" in shown[2]
