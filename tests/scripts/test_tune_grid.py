from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.tune_axes import parse_axis
from headrace.plan.search import key_of
from tests.scripts.load_script import load_script

tune_grid = load_script("tune_grid")


def test_the_grid_is_every_combination_and_its_median(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class FakeTrials:
        def __init__(self, *things: object, end: float) -> None:
            pass

        def __enter__(self) -> FakeTrials:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def score(self, settings: dict[str, Any], best: float) -> float:
            made.append(settings)
            return float(settings["max-num-seqs"]) + (10.0 if len(made) > 8 else 0.0)  # the third repeat was another's

    monkeypatch.setattr(tune_grid, "Trials", FakeTrials)
    axes = [parse_axis("max-num-seqs=1,2"), parse_axis("max-num-batched-tokens=128,512")]
    scores, seconds = tune_grid.grid(axes, "burst:prompt=4,output=4,requests=2", "", tmp_path, 3)
    assert scores == {key_of({"max-num-seqs": rows, "max-num-batched-tokens": tokens}): float(rows) for rows in (1, 2) for tokens in (128, 512)}
    assert made[:4] == made[7:3:-1], "up, then down"
    assert seconds >= 0.0
