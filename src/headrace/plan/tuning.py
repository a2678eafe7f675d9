"""What a trial of `headrace tune` is worth, what the simulation expects of it, and the file that a stopped search goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.bench.figures import samples
from headrace.bench.load import Run
from headrace.errors import ConfigError
from headrace.plan.search import Axis, Settings, key_of
from headrace.plan.slo import Limit, kept_share

NEAR = 0.9  # of the best score: what one run of each cannot tell from the best
MOST_CONTENDERS = 3  # that are measured again
RUNS = 3  # of each of them, with the first one
ROOM = 0.2  # by how much limits that are kept with all the room there is are better than limits that are just kept


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A server under the load; of several runs the means."""

    settings: dict[str, Any]  # by flag, as the config file has them
    score: float
    seconds: float  # a run took, the server's start included
    cut_short: bool = False  # it could not win any more
    error: str | None = None  # why the server does not serve with these settings
    figures: dict[str, float] | None = None  # by the names of `bench serve`
    runs: int = 1

    def with_run(self, other: TrialResult) -> TrialResult:
        """The means with one run more, of the same settings. A run that failed leaves them as they are."""
        if self.figures is None or other.figures is None:
            return self

        def mean(before: float, now: float) -> float:
            return before + (now - before) / (self.runs + 1)

        return replace(
            self,
            score=mean(self.score, other.score),
            seconds=mean(self.seconds, other.seconds),
            figures={name: mean(value, other.figures[name]) for name, value in self.figures.items()},
            runs=self.runs + 1,
        )


def score_of(throughput: float, limits: Sequence[Limit], values: Mapping[str, float]) -> float:
    """Requests per second, times how much of a missed limit's time was allowed; kept limits count up to `ROOM` more, by how far they are away.

    `values`: seconds by the limits' names. Without limits the throughput alone.
    """
    if not limits:
        return throughput
    kept = kept_share(limits, values)
    if kept < 1.0:
        return throughput * kept
    worst = max(values[limit.name] / limit.seconds for limit in limits)
    return throughput * (1.0 + ROOM * (1.0 - worst))


def score_run(run: Run, limits: Sequence[Limit]) -> float:
    """Of a real run; a failed request counts as none."""
    good = [record for record in run.records if record.ok]
    found = samples(good)
    values = {limit.name: limit.value(sorted(found[limit.metric])) for limit in limits}
    return score_of(len(good) / max(run.seconds, 1e-9), limits, values)


def time_to_lose(count: int, best: float, limits: Sequence[Limit]) -> float | None:
    """Seconds after which a run of so many requests can't reach the best score any more; None while there is none."""
    return count * (1.0 + (ROOM if limits else 0.0)) / best if best > 0.0 else None


def best_start(axes: Sequence[Axis], start: Settings, expected: Callable[[Settings], float], *, simulated: frozenset[str]) -> dict[str, Any]:
    """Where the simulation says the top is: coordinate by coordinate, over the axes that it knows."""
    best, found = dict(start), expected(start)
    for _ in range(2):
        for axis in axes:
            if axis.name not in simulated:
                continue
            for value in axis.values:
                settings = best | {axis.name: value}
                worth = expected(settings)
                if worth > found:
                    best, found = settings, worth
    return best


class TrialBook:
    """Every trial that was made, in a file; a search that was stopped finds its trials there. `subject`: what they are comparable by.

    Raises `ConfigError` where the file holds trials of something else.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self._path = path
        self._subject = dict(subject)
        self.trials: list[TrialResult] = []
        if not path.exists():
            return
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            known = value["subject"]
            self.trials = [TrialResult(**trial) for trial in value["trials"]]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"--state: {path} holds no trials: {error}. Name another file.") from error
        if different := sorted(name for name in {*known, *self._subject} if known.get(name) != self._subject.get(name)):
            name = different[0]
            raise ConfigError(
                f"--state: {path} holds trials of another {name} ({known.get(name)!r}, not {self._subject.get(name)!r}). "
                "Name another file, or delete it to begin anew."
            )

    def find(self, settings: Settings) -> TrialResult | None:
        key = key_of(settings)
        return next((trial for trial in self.trials if key_of(trial.settings) == key), None)

    def add(self, trial: TrialResult) -> None:
        """One more; of settings that are there already, one more run."""
        known = self.find(trial.settings)
        if known is None:
            self.trials.append(trial)
        else:
            self.trials[self.trials.index(known)] = known.with_run(trial)
        draft = self._path.with_name(self._path.name + ".part")
        value = {"subject": self._subject, "trials": [asdict(entry) for entry in self.trials]}
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self._path)  # whole or not at all


def race(trials: Sequence[TrialResult], run: Callable[[Settings], None]) -> None:
    """Has those that are nearly the best run again, in turn, so that a machine that is faster for a while is so for all of them.

    `run` adds a run to one of them. Raises `OutOfTime` where that does.
    """
    best = max((trial.score for trial in trials), default=0.0)
    near = sorted((trial for trial in trials if trial.figures is not None and trial.score >= NEAR * best), key=lambda trial: -trial.score)
    if len(near) < 2:
        return
    for lap in range(1, RUNS):
        for trial in near[:MOST_CONTENDERS]:
            if trial.runs <= lap:  # a search that was stopped has had some of them
                run(trial.settings)


def curves(axes: Sequence[Axis], best: Settings, trials: Sequence[TrialResult]) -> dict[str, list[TrialResult]]:
    """For each axis the trials that differ from the best in that alone, in the order of its values; only axes with more than one."""
    found = {}
    for axis in axes:
        line = [trial for trial in trials if all(trial.settings[name] == value for name, value in best.items() if name != axis.name)]
        line.sort(key=lambda trial: axis.values.index(trial.settings[axis.name]))
        if len(line) > 1:
            found[axis.name] = line
    return found


def report(axes: Sequence[Axis], best: TrialResult, trials: Sequence[TrialResult], limits: Sequence[Limit]) -> str:
    """The curves through the best point, for a terminal."""
    lines = [f"{len(trials)} trials in {sum(trial.seconds * trial.runs for trial in trials):.0f} s"]
    for name, line in curves(axes, best.settings, trials).items():
        lines.append(f"{name:<28}{'score':>8}{'requests/s':>12}{'tokens/s':>10}{'TTFT p95':>10}{'ITL p95':>9}{'E2EL p95':>10}  (ms)")
        top = max(trial.score for trial in line)
        for trial in line:
            mark = f"{f' ({trial.runs} runs)' if trial.runs > 1 else ''}{' <- best' if trial is best else ''}"
            lines.append(f"  {shown(trial.settings[name]):<26}{_row(trial)}  {'#' * round(20 * trial.score / top if top else 0)}{mark}")
    if limits and best.figures is not None and best.score < best.figures["request_throughput"]:
        lines.append(f"No setting that was tried keeps {', '.join(map(str, limits))}.")
    return "\n".join(lines)


def shown(value: Any) -> str:
    return "-" if value is None else json.dumps(value) if isinstance(value, dict) else str(value).lower() if isinstance(value, bool) else str(value)


def _row(trial: TrialResult) -> str:
    if trial.error is not None:
        return f"{'does not start':>59}"
    if trial.figures is None:
        return f"{trial.score:>8.3f}{'ended early':>51}"
    names = ("request_throughput", "output_throughput", "p95_ttft_ms", "p95_itl_ms", "p95_e2el_ms")
    values = [trial.figures[name] for name in names]
    return f"{trial.score:>8.3f}{values[0]:>12.3f}{values[1]:>10.1f}{values[2]:>10.0f}{values[3]:>9.1f}{values[4]:>10.0f}"
