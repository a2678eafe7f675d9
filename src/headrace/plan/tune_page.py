"""The report of `headrace tune` as a page for somebody who was not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.bench import html
from headrace.bench.html import Bar
from headrace.plan.search import Axis
from headrace.plan.slo import Limit
from headrace.plan.tuning import TrialResult, curves, shown

COLUMNS = (
    ("request_throughput", "requests/s", "{:.2f}"),
    ("output_throughput", "tokens/s", "{:.0f}"),
    ("p95_ttft_ms", "TTFT P95, ms", "{:.0f}"),
    ("p95_itl_ms", "ITL P95, ms", "{:.1f}"),
    ("p95_e2el_ms", "E2E P95, ms", "{:.0f}"),
)
CAVEATS = (
    "Scores are of one run each, those of the best few the mean of up to three, on one machine and one load; another load has another best.",
    "A trial that could no longer win was ended early; it stands at the rate that it had reached by then.",
    "Each curve goes through the best settings: all others are held while one varies. Not every combination was tried.",
)


def tune_page(axes: Sequence[Axis], best: TrialResult, trials: Sequence[TrialResult], limits: Sequence[Limit], facts: Mapping[str, object]) -> str:
    """One HTML file: a plot for each setting, and a table of all trials."""
    sections = []
    for name, line in curves(axes, best.settings, trials).items():
        started = [trial for trial in line if trial.error is None]
        ordered = all(isinstance(trial.settings[name], int | float) and not isinstance(trial.settings[name], bool) for trial in started)
        if ordered and len(started) > 1:
            points = [(float(trial.settings[name]), trial.score) for trial in started]
            body = html.curves({"score": points}, x_label=name, y_label="score", mark=(float(best.settings[name]), "best"))
        else:
            body = html.bars([Bar(label=shown(trial.settings[name]), value=trial.score, text=f"{trial.score:.2f}") for trial in line])
        sections.append(html.section(name, body, "Requests per second, weighed with the limits; higher is better."))
    ranked = sorted(trials, key=lambda trial: -trial.score)
    head = [*(axis.name for axis in axes), "score", *(words for _, words, _ in COLUMNS)]
    rows = [[*(shown(trial.settings[axis.name]) for axis in axes), f"{trial.score:.3f}", *_figures(trial)] for trial in ranked]
    sections.append(html.section("All trials", html.table(head, rows), "The best first."))
    wanted = ", ".join(map(str, limits)) or "the highest throughput"
    chosen = ", ".join(f"{name} {shown(value)}" for name, value in best.settings.items())
    lead = f"For {wanted} the best of {len(trials)} settings that were measured: {chosen}."
    return html.document("The best settings here", lead=lead, sections=sections, facts=facts, caveats=CAVEATS)


def _figures(trial: TrialResult) -> list[str]:
    if trial.figures is None:
        return ["does not start" if trial.error is not None else "ended early", *("" for _ in COLUMNS[1:])]
    return [form.format(trial.figures[name]) for name, _, form in COLUMNS]
