from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.load import Run
from headrace.bench.sse_client import Record
from headrace.errors import ConfigError
from headrace.plan.search import Axis, Settings
from headrace.plan.slo import parse_slo
from headrace.plan.tuning import ROOM, TrialBook, TrialResult, curves, race, report, score_of, score_run, time_to_lose

AXES = [Axis(name="max-num-seqs", values=(4, 8, 16), ordered=True), Axis(name="threads", values=(1, 2), ordered=True)]
FIGURES = dict.fromkeys(("request_throughput", "output_throughput", "p95_ttft_ms", "p95_itl_ms", "p95_e2el_ms"), 7.0)


def trial(seqs: int, threads: int, score: float, **rest: object) -> TrialResult:
    values = {"seconds": 10.0, "figures": FIGURES} | rest
    return TrialResult(settings={"max-num-seqs": seqs, "threads": threads}, score=score, **values)  # type: ignore[arg-type]


def test_a_score_falls_with_what_is_missed_and_rises_with_room() -> None:
    limits = parse_slo("p95_ttft=1s,p95_itl=100ms")
    values = {"p95_ttft": 0.5, "p95_itl": 0.05}
    assert score_of(4.0, (), {}) == 4.0
    assert score_of(4.0, limits, values) == pytest.approx(4.0 * (1 + ROOM / 2))
    assert score_of(4.0, limits, values | {"p95_ttft": 1.0}) == pytest.approx(4.0)
    assert score_of(4.0, limits, values | {"p95_ttft": 4.0}) == pytest.approx(1.0)


def test_the_score_of_a_run() -> None:
    records = [Record(sent=0.0, first=0.5, last=1.5, gaps=[0.5, 0.5], num_output_tokens=3), Record(sent=0.0, error="status 500")]
    run = Run(records=tuple(records), seconds=2.0)
    assert score_run(run, ()) == 0.5
    assert score_run(run, parse_slo("p95_ttft=250ms")) == 0.25
    assert score_run(Run(records=(records[1],), seconds=2.0), parse_slo("p95_ttft=250ms")) == 0.0


def test_when_a_trial_cannot_win_any_more() -> None:
    assert time_to_lose(10, 0.0, ()) is None
    assert time_to_lose(10, 2.0, ()) == 5.0
    lost = time_to_lose(10, 2.0, parse_slo("p95_ttft=250ms"))
    assert lost is not None
    assert score_of(10 / lost, parse_slo("p95_ttft=250ms"), {"p95_ttft": 1e-9}) <= 2.0 + 1e-6


def test_trials_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    book = TrialBook(path, {"model": "m", "slo": ["p95_ttft=1ms"]})
    book.add(trial(4, 1, 2.0))
    book.add(trial(8, 1, 0.0, figures=None, error="no memory"))
    again = TrialBook(path, {"model": "m", "slo": ["p95_ttft=1ms"]})
    assert again.trials == book.trials
    assert again.find({"threads": 1, "max-num-seqs": 4}) == book.trials[0]
    assert again.find({"threads": 2, "max-num-seqs": 4}) is None
    with pytest.raises(ConfigError, match=r"trials of another model \('m', not 'n'\)"):
        TrialBook(path, {"model": "n", "slo": ["p95_ttft=1ms"]})
    path.write_text("{}")
    with pytest.raises(ConfigError, match="holds no trials"):
        TrialBook(path, {})


def test_the_curve_shows_that_more_was_worse() -> None:
    best = trial(8, 2, 5.0)
    trials = [trial(4, 1, 1.0), best, trial(16, 2, 4.0), trial(4, 2, 2.5, figures=None, cut_short=True), trial(8, 1, 0.0, figures=None, error="x")]
    lines = curves(AXES, best.settings, trials)
    assert [[entry.settings[name] for entry in line] for name, line in lines.items()] == [[4, 8, 16], [1, 2]]
    words = report(AXES, best, trials, ())
    assert "5 trials in 50 s" in words
    rows = [line.split() for line in words.splitlines()[2:5]]
    assert [(row[0], row[1]) for row in rows] == [("4", "2.500"), ("8", "5.000"), ("16", "4.000")]
    assert words.count("<- best") == 2
    assert "ended early" in words
    assert "does not start" in words
    assert "No setting" not in words
    assert "No setting that was tried keeps p95_ttft=1ms." in report(AXES, best, trials, parse_slo("p95_ttft=1ms"))


def test_what_is_nearly_the_best_is_run_again_in_turn_and_means_count(tmp_path: Path) -> None:
    book = TrialBook(tmp_path / "trials.json", {})
    first = {4: 10.0, 8: 9.5, 16: 9.4, 32: 9.3, 64: 5.0}  # one run each; 4 was lucky, 32 is the fourth
    later = {4: 8.5, 8: 9.5, 16: 9.7, 32: 9.0}
    for seqs, score in first.items():
        book.add(trial(seqs, 1, score))
    turns: list[int] = []

    def run(settings: Settings) -> None:
        turns.append(settings["max-num-seqs"])
        book.add(trial(turns[-1], 1, later[turns[-1]], seconds=16.0))

    race(book.trials.copy(), run)
    assert turns == [4, 8, 16] * 2
    found = {entry.settings["max-num-seqs"]: entry for entry in TrialBook(tmp_path / "trials.json", {}).trials}
    assert {seqs: entry.runs for seqs, entry in found.items()} == {4: 3, 8: 3, 16: 3, 32: 1, 64: 1}
    assert max(found.values(), key=lambda entry: entry.score).settings["max-num-seqs"] == 16
    assert found[4].score == pytest.approx(9.0)
    assert found[4].seconds == pytest.approx(14.0)
    race(book.trials.copy(), run)
    race(book.trials.copy(), run)
    assert turns[6:] == [32, 32], "a search that goes on races what has come up since, and the others no more"


def test_no_race_is_run_where_one_is_clearly_the_best(tmp_path: Path) -> None:
    race([trial(4, 1, 10.0), trial(8, 1, 5.0), trial(16, 1, 9.9, figures=None, cut_short=True)], lambda settings: pytest.fail("nothing is near"))
