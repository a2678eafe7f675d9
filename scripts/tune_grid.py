#!/usr/bin/env python3
"""Whether `headrace tune` finds what an exhaustive grid finds: both on real servers, over the same flags and loads.

    python scripts/tune_grid.py
    python scripts/tune_grid.py --part 230s                 # again and again, until it no longer ends with status 3
    python scripts/tune_grid.py --search threads=1,2 --trace poisson:rate=4,prompt=96,output=32,requests=60 --slo p95_e2el=5s

The grid is tried `--repeats` times, every combination once before any of them again, in another order each time, with the same requests at the same
moments. A machine is faster at one time than at another; so each score is divided by the mean of its repeat, and the median over the repeats counts.
How far the repeats of one combination lie apart says what differences mean anything. Then the verb gets a part of one repeat's time (`--share`), and
what it chose is looked up in the grid: its score by that of the grid's best in the same repeat, the median of these. `--trace` and `--slo` belong
together in their order and may be given again; without them there are two loads: all requests at once, and a rate with limits.

What was measured is kept in `--state`, and the same command goes on from there. The exit status is 1 where a choice is more than 5 % below the grid's
best, 3 where `--part` is over and something is left to do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.traces import load_trace
from headrace.cli import values
from headrace.cli.main import main as headrace
from headrace.cli.tune_axes import merged, parse_axis
from headrace.cli.tune_trial import Trials
from headrace.plan.search import Axis, Settings
from headrace.plan.slo import parse_slo
from headrace.plan.tuning import TrialBook

SEARCH = ("max-num-seqs=4,8,16,32", "max-num-batched-tokens=128,512,2048")
LOADS = (
    ("burst:prompt=96,output=32,requests=32,sigma=0.5", ""),
    ("poisson:rate=5,prompt=96,output=32,requests=40,sigma=0.5", "p95_ttft=1s,p95_itl=100ms"),
)
LEAST_SHARE = 0.95  # of the best score
UNFINISHED = 3
LAST_S = 20.0  # no trial begins so shortly before the end of a part

Scores = list[dict[str, float]]  # of each repeat, by combination


class PartOver(Exception):
    """What is left is for another call."""


class State:
    """What was measured of one load: scores and seconds of each repeat, and what the verb chose."""

    def __init__(self, path: Path, load: str) -> None:
        self._path, self._load = path, load
        self._all: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found: dict[str, Any] = self._all.setdefault(load, {"scores": [], "seconds": [], "tuned": None})

    def save(self) -> None:
        self._path.write_text(json.dumps(self._all, indent=1) + "\n")


def named(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(settings.items()))


def combinations(axes: Sequence[Axis]) -> list[Settings]:
    return [dict(zip((axis.name for axis in axes), place, strict=True)) for place in itertools.product(*(axis.values for axis in axes))]


def measure_grid(axes: Sequence[Axis], trace: str, slo: str, state: State, repeats: int, left: Callable[[], float]) -> None:
    """Fills `state` with what is missing of the grid. Raises `PartOver`."""
    limits = parse_slo(slo) if slo else ()
    scores, seconds = state.found["scores"], state.found["seconds"]
    for number in range(repeats):
        if number == len(scores):
            scores.append({})
            seconds.append(0.0)
        order = combinations(axes)
        random.Random(number).shuffle(order)
        with (
            tempfile.TemporaryDirectory() as folder,
            Trials(None, load_trace(trace), limits, {}, TrialBook(Path(folder) / "trials.json", {}), end=float("inf"), record=False) as trials,
        ):
            for settings in order:
                if named(settings) in scores[number]:
                    continue
                if left() < LAST_S:
                    raise PartOver
                begin = time.monotonic()
                scores[number][named(settings)] = trials.score(settings, 0.0)
                seconds[number] += time.monotonic() - begin
                state.save()


def relative(scores: Scores) -> dict[str, list[float]]:
    """Of each combination its scores by the means of their repeats."""
    means = [statistics.fmean(repeat.values()) for repeat in scores]
    return {name: [repeat[name] / mean for repeat, mean in zip(scores, means, strict=True)] for name in scores[0]}


def share_of_best(scores: Scores, chosen: str) -> float:
    """The chosen one's score by that of the grid's best, in the median repeat."""
    found = relative(scores)
    best = max(found, key=lambda name: statistics.median(found[name]))
    return statistics.median(repeat[chosen] / repeat[best] for repeat in scores)


def table(scores: Scores, chosen: str) -> str:
    found = relative(scores)
    ranked = sorted(found, key=lambda name: -statistics.median(found[name]))
    apart = {name: (max(values) - min(values)) / statistics.median(values) for name, values in found.items()}
    lines = [f"  {'combination':<50}{'by the mean':>12}{'repeats apart':>15}"]
    for name in ranked:
        marks = ["best"] * (name == ranked[0]) + ["tune's choice"] * (name == chosen)
        lines.append(f"  {name:<50}{statistics.median(found[name]):>12.3f}{apart[name]:>14.1%}  {', '.join(marks)}")
    lines.append(f"  repeats of one combination lie {statistics.median(apart.values()):.1%} apart in the middle, {max(apart.values()):.1%} at most")
    return "\n".join(lines)


def tuned(search: Sequence[str], trace: str, slo: str, seconds: float) -> dict[str, Any]:
    """What the verb chose in so many seconds, after how many trials, and how long it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["tune", "--trace", trace, "--time-budget", f"{seconds:.0f}s", "--output", str(folder / "tuned.yaml")]
        words += ["--json", str(folder / "tune.json"), "--state", str(folder / "trials.json"), *(["--slo", slo] if slo else [])]
        words += [word for text in search for word in ("--search", text)]
        begin = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            status = headrace(words)
        if status:
            raise SystemExit(f"headrace tune ended with {status}")
        found = json.loads((folder / "tune.json").read_text())
    return {"chosen": named(found["best"]["settings"]), "trials": len(found["trials"]), "seconds": time.monotonic() - begin}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="append", metavar="FLAG=V,V", help=f"default: {' and '.join(SEARCH)}")
    parser.add_argument("--trace", action="append", metavar="TRACE", help="a load, as of `headrace tune`")
    parser.add_argument("--slo", action="append", metavar="LIMITS", help="of the trace at the same place; '' for throughput alone")
    parser.add_argument("--repeats", type=int, default=3, help="of the grid (default: 3)")
    parser.add_argument("--share", type=float, default=0.25, help="of one repeat's time that the search gets (default: 0.25)")
    parser.add_argument("--part", type=values.duration, default=float("inf"), metavar="TIME", help="when to stop, to go on in another call")
    parser.add_argument("--state", type=Path, default=Path("tune-grid.json"), metavar="FILE", help="what was measured (default: %(default)s)")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.part
    search = options.search or SEARCH
    axes = merged([parse_axis(text) for text in search])
    loads = LOADS if options.trace is None else tuple(itertools.zip_longest(options.trace, options.slo or (), fillvalue=""))
    good = True
    for trace, slo in loads:
        state = State(options.state, json.dumps([trace, slo, list(search), options.repeats, options.share]))
        found = state.found
        try:
            measure_grid(axes, trace, slo, state, options.repeats, lambda: end - time.monotonic())
            seconds = statistics.median(found["seconds"])
            if found["tuned"] is None:
                if end - time.monotonic() < options.share * seconds + LAST_S:
                    raise PartOver
                found["tuned"] = tuned(search, trace, slo, options.share * seconds)
                state.save()
        except PartOver:
            print(f"{trace} {slo}: {sum(map(len, found['scores']))} of {options.repeats * len(combinations(axes))} trials; the same command goes on")
            return UNFINISHED
        choice = found["tuned"]
        share = share_of_best(found["scores"], choice["chosen"])
        good &= share >= LEAST_SHARE
        print(f"{trace} {slo}: {len(found['scores'][0])} combinations in {seconds:.0f} s, {options.repeats} times")
        print(table(found["scores"], choice["chosen"]))
        took = choice["seconds"]
        print(f"  tune: {choice['trials']} trials in {took:.0f} s ({took / seconds:.0%} of one grid's time), {share:.1%} of the best", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
