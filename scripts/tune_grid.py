#!/usr/bin/env python3
"""Whether `headrace tune` finds what an exhaustive grid finds: both on real servers, over the same flags and loads.

    python scripts/tune_grid.py
    python scripts/tune_grid.py --search threads=1,2 --trace poisson:rate=4,prompt=96,output=32,requests=60 --slo p95_e2el=5s

The grid tries every combination, `--repeats` times, and its medians are the truth. Then the verb gets a part of one repeat's time (`--share`), and
what it chose is looked up in the grid: so that the machine's speed at another time has no say. `--trace` and `--slo` belong together in their order
and may be given again; without them there are two loads: all requests at once, and a rate with limits. The exit status is 1 where a choice is more
than 5 % below the grid's best.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.traces import load_trace
from headrace.cli.main import main as headrace
from headrace.cli.tune_axes import merged, parse_axis
from headrace.cli.tune_trial import Trials
from headrace.plan.search import Axis, Settings, key_of
from headrace.plan.slo import parse_slo
from headrace.plan.tuning import TrialBook

SEARCH = ("max-num-seqs=2,8,16,32", "max-num-batched-tokens=128,512,2048")
LOADS = (
    ("burst:prompt=96,output=32,requests=32,sigma=0.5", ""),
    ("poisson:rate=3,prompt=96,output=32,requests=32,sigma=0.5", "p95_ttft=1s,p95_itl=100ms"),
)
LEAST_SHARE = 0.95  # of the best score


def grid(axes: Sequence[Axis], trace: str, slo: str, folder: Path, repeats: int) -> tuple[dict[tuple[tuple[str, str], ...], float], float]:
    """The median score of each combination, and the seconds of one repeat. The order changes from repeat to repeat."""
    limits = parse_slo(slo) if slo else ()
    combinations: list[Settings] = [
        dict(zip((axis.name for axis in axes), values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))
    ]
    scores: dict[tuple[tuple[str, str], ...], list[float]] = {key_of(settings): [] for settings in combinations}
    begin = time.monotonic()
    for number in range(repeats):
        book = TrialBook(folder / f"grid-{number}.json", {})
        with Trials(None, load_trace(trace), limits, {}, book, end=float("inf")) as trials:
            for settings in combinations if number % 2 == 0 else combinations[::-1]:
                scores[key_of(settings)].append(trials.score(settings, 0.0))
    return {key: statistics.median(found) for key, found in scores.items()}, (time.monotonic() - begin) / repeats


def tuned(search: Sequence[str], trace: str, slo: str, folder: Path, seconds: float) -> tuple[tuple[tuple[str, str], ...], int, float]:
    """What the verb chose in so many seconds, after how many trials, and how long it took."""
    words = [
        "tune",
        "--trace",
        trace,
        "--time-budget",
        f"{seconds:.0f}s",
        "--output",
        str(folder / "tuned.yaml"),
        "--json",
        str(folder / "tune.json"),
    ]
    words += ["--state", str(folder / "trials.json"), *(["--slo", slo] if slo else []), *(word for text in search for word in ("--search", text))]
    begin = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        status = headrace(words)
    if status:
        raise SystemExit(f"headrace tune ended with {status}")
    found = json.loads((folder / "tune.json").read_text())
    return key_of(found["best"]["settings"]), len(found["trials"]), time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="append", metavar="FLAG=V,V", help=f"default: {' and '.join(SEARCH)}")
    parser.add_argument("--trace", action="append", metavar="TRACE", help="a load, as of `headrace tune`")
    parser.add_argument("--slo", action="append", metavar="LIMITS", help="of the trace at the same place; '' for throughput alone")
    parser.add_argument("--repeats", type=int, default=1, help="of the grid (default: 1)")
    parser.add_argument("--share", type=float, default=0.25, help="of the grid's time that the search gets (default: 0.25)")
    options = parser.parse_args()
    search = options.search or SEARCH
    axes = merged([parse_axis(text) for text in search])
    loads = LOADS if options.trace is None else tuple(itertools.zip_longest(options.trace, options.slo or (), fillvalue=""))
    good = True
    for trace, slo in loads:
        with tempfile.TemporaryDirectory() as name:
            scores, seconds = grid(axes, trace, slo, Path(name), options.repeats)
            chosen, trials, took = tuned(search, trace, slo, Path(name), options.share * seconds)
        best = max(scores, key=scores.__getitem__)
        share = scores[chosen] / scores[best]
        good &= share >= LEAST_SHARE
        print(f"{trace} {slo}: {len(scores)} combinations in {seconds:.0f} s, scores {min(scores.values()):.3f} to {scores[best]:.3f}")
        for key, score in sorted(scores.items(), key=lambda item: -item[1]):
            marks = ["best"] * (key == best) + ["tune's choice"] * (key == chosen)
            print(f"  {', '.join(f'{flag} {value}' for flag, value in key):<50}{score:>8.3f}  {', '.join(marks)}")
        print(f"  tune: {trials} trials in {took:.0f} s ({took / seconds:.0%} of the grid's time), {share:.1%} of the best score", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
