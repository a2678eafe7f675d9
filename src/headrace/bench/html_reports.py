"""Results as pages for somebody who was not there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench import html, ladder
from headrace.bench.figures import IDLE_KINDS, METRICS, knee, percentile
from headrace.bench.html import Bar
from headrace.bench.report import RATIOS
from headrace.observe.work import WORDS

BUSY_WORDS = {kind: words for kind, words in WORDS.items() if kind not in IDLE_KINDS}
LADDER_WORDS = BUSY_WORDS | {"padding": "answers of a batch that had ended, and places of a static shape"}
_PERCENTILES = ("median", "p95", "p99")
_SHOWN = (1, 5, *range(10, 100, 5), 99)


def ladder_page(result: Mapping[str, Any]) -> str:
    """Of what `headrace bench ladder` measured."""
    rungs: Sequence[Mapping[str, Any]] = result["rungs"]
    titles = [f"{number}. {rung['title']}" for number, rung in enumerate(rungs, start=1)]
    numbers = {rung["name"]: number for number, rung in enumerate(rungs, start=1)}

    def more(rung: Mapping[str, Any]) -> str:
        gain = rung["over_base"]["request_throughput"]
        return "" if gain is None else f"{gain:.2f} x rung {numbers[rung['base']]}"

    def sooner(rung: Mapping[str, Any]) -> str:
        gain = rung["over_base"]["shared_ttft"]
        if gain is None:
            return ""
        return f"{gain:.1f} x sooner than rung {numbers[rung['base']]}" if gain >= 1 else f"{1 / gain:.1f} x later than rung {numbers[rung['base']]}"

    def times(rung: Mapping[str, Any], metric: str) -> list[Bar]:
        values = [rung["figures"][f"{which}_{metric}_ms"] / 1e3 for which in _PERCENTILES]
        return [Bar(label="", value=value, text=f"{value:.2f} s") for value in values]

    pairs = list(zip(titles, rungs, strict=True))
    throughput = [Bar(label=t, value=(v := r["figures"]["request_throughput"]), text=f"{v:.2f}", extra=more(r)) for t, r in pairs]
    shared = [_milliseconds(title, rung["shared_context"]["median_ttft_ms"], sooner(rung)) for title, rung in pairs]
    busy = [(title, None if rung["work"] is None else {kind: rung["work"][kind] for kind in BUSY_WORDS}) for title, rung in pairs]
    rows = [[title, *ladder.cells_of(rung)] for title, rung in pairs]
    what = "".join(
        f"<li><b>{html.escape(rung['title'])}</b>: {html.escape(rung['words'])}.<br><code>{html.escape(rung['command'])}</code></li>"
        for rung in rungs
    )
    tokens = rungs[0]["shared_context"]["prompt_tokens"]
    shared_note = f"Median time to the first token of a prompt of {tokens:,} tokens whose beginning another one had before; lower is better."
    e2e = [(title, times(rung, "e2el")) for title, rung in pairs]
    ttft = [(title, times(rung, "ttft")) for title, rung in pairs]
    units = "E2E and TTFT in seconds, ITL and shared TTFT in milliseconds, peak memory of all processes in MiB; useful: share of busy time."
    sections = [
        html.section("Requests per second", html.bars(throughput), "The same work for every rung; higher is better."),
        html.section("Time to the first token behind a shared context", html.bars(shared, colour="two"), shared_note),
        html.section("End-to-end latency under load", html.grouped_bars(e2e, ("P50", "P95", "P99")), "Seconds from sending a request to its end."),
        html.section("Time to first token under load", html.grouped_bars(ttft, ("P50", "P95", "P99")), "Seconds, waiting for a turn included."),
        html.section("What the busy time went into", html.stacked_bars(busy, LADDER_WORDS), "Under the same load; time without work is left out."),
        html.section("All figures", html.table(["rung", *ladder.COLUMNS], rows), units),
        html.section("The rungs", f"<ol>{what}</ol>"),
    ]
    top = max(rungs, key=lambda rung: rung["figures"]["request_throughput"])
    gain = top["over_lowest"]["request_throughput"]
    lead = f"Rung {numbers[top['name']]} ({top['title']}) serves {top['figures']['request_throughput']:.2f} requests a second"
    lead += f", {gain:.1f} times what rung 1 ({rungs[0]['title']}) does on this machine." if gain is not None and top is not rungs[0] else "."
    return html.document("The ladder", lead=lead, sections=sections, facts=_facts(result) | {"load": result["load"]}, caveats=result["caveats"])


def serve_page(results: Sequence[tuple[float, int, float, dict[str, Any]]], samples: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """Of what `headrace bench serve` measured. `results`: as of `figures.knee`. `samples`: seconds by metric of each run (`figures.samples`)."""
    found = [values for *_, values in results]
    shown = [f"{values['request_rate']}/s" for values in found]
    several = len(results) > 1
    best = max(found, key=lambda values: values["request_throughput"])
    at = knee(results) if several else None
    lead = f"{best['completed']} of {best['num_prompts']} requests ended well, {best['request_throughput']:.2f} a second"
    lead += f"; half had their first token within {_shown_ms(best['median_ttft_ms'])}."
    sections = []
    if several:
        lead = "It keeps up with none of these rates." if at is None else f"It keeps up with up to {at:g} requests a second."
        rates = [rate for rate, *_ in results]
        mark = None if at is None else (at, f"keeps up with {at:g}/s")
        for metric in ("ttft", "e2el", "itl"):
            curve = {f"P{p}": [(rate, v[f"p{p}_{metric}_ms"]) for rate, v in zip(rates, found, strict=True)] for p in (95, 99)}
            curve = {"P50": [(rate, v[f"median_{metric}_ms"]) for rate, v in zip(rates, found, strict=True)]} | curve
            sections.append(html.section(METRICS[metric], html.curves(curve, x_label="requests a second", y_label="milliseconds", mark=mark)))
        served = {
            "served": [(rate, v["request_throughput"]) for rate, v in zip(rates, found, strict=True)],
            "asked": [(rate, rate) for rate in rates],
        }
        sections.insert(0, html.section("Served", html.curves(served, x_label="requests asked for a second", y_label="requests a second", mark=mark)))
    else:
        for metric in ("ttft", "e2el", "itl"):
            if values := sorted(1e3 * value for value in samples[0][metric]):
                curve = {"": [(share, percentile(values, share)) for share in _SHOWN]}
                body = html.curves(curve, x_label="percent of all stay below", y_label="milliseconds")
                sections.append(html.section(METRICS[metric], body))
    work = [(rate, values.get("work_seconds")) for rate, values in zip(shown, found, strict=True)]
    if any(seconds for _, seconds in work):
        sections.append(html.section("What the server's time went into", html.stacked_bars(work, WORDS), "By its own account, while the load ran."))
    sections.append(html.section("All figures", _figures_table(shown, found), "Times in milliseconds."))
    caveats = [
        f"{values['failed']} requests failed at {rate}; latencies are those of the others."
        for rate, values in zip(shown, found, strict=True)
        if values["failed"]
    ]
    few = min(values["completed"] for values in found)
    caveats += [f"P99 of {few} requests is nearly the slowest of them."] if few < 200 else []
    caveats.append("The load came from this machine or its network: the client's own share of processor time and the way are in the latencies.")
    facts = _facts(found[0]) | {"server": found[0]["base_url"], "model": found[0]["model_id"], "load": _load_words(found[0])}
    return html.document(f"A load on {found[0]['base_url']}", lead=lead, sections=sections, facts=facts, caveats=caveats)


def compare_page(rounds: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Of what `headrace bench compare` measured: figures of each side in each round."""
    names = [side[0]["base_url"] for side in rounds]
    rows, ratio_rows = [], []
    for key, words in RATIOS:
        sides = [[found[key] for found in side] for side in rounds]
        medians = [statistics.median(side) for side in sides]
        ratios = [one / other for one, other in zip(*sides, strict=True) if other]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
        rows.append([words, *(f"{median:.2f}" for median in medians), spread])
        ratio_rows.append(Bar(label=words, value=statistics.median(ratios) if ratios else None, text=spread))
    throughput = [
        (f"round {number}", [Bar(label="", value=(v := found["request_throughput"]), text=f"{v:.2f}") for found in pair])
        for number, pair in enumerate(zip(*rounds, strict=True), start=1)
    ]
    first = statistics.median(a["request_throughput"] / b["request_throughput"] for a, b in zip(*rounds, strict=True) if b["request_throughput"])
    sections = [
        html.section("Requests per second", html.grouped_bars(throughput, names), "Each round has both, in an order that changes."),
        html.section(
            "The first to the second", html.bars(ratio_rows), "Ratios: median of the rounds, lowest and highest. For times, below 1 is faster."
        ),
        html.section("Medians of the rounds", html.table(["", *names, "ratio (spread)"], rows)),
    ]
    lead = f"{names[0]} serves {first:.2f} times as many requests a second as {names[1]} (median of {len(rounds[0])} rounds)."
    facts = _facts(rounds[0][0]) | {"model": ", ".join(dict.fromkeys(side[0]["model_id"] for side in rounds)), "load": _load_words(rounds[0][0])}
    caveats = ["Only ratios within a round are compared: the machine's speed may differ between rounds."]
    failed = sum(found["failed"] for side in rounds for found in side)
    caveats += [f"{failed} requests failed; latencies are those of the others."] if failed else []
    return html.document("Two servers in turn", lead=lead, sections=sections, facts=facts, caveats=caveats)


def _figures_table(shown: Sequence[str], found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        ["Successful requests", *(f"{values['completed']}" for values in found)],
        ["Failed requests", *(f"{values['failed']}" for values in found)],
        ["Requests/s", *(f"{values['request_throughput']:.3f}" for values in found)],
        ["Good requests/s", *("-" if (good := values["request_goodput"]) is None else f"{good:.3f}" for values in found)],
        ["Output tokens/s", *(f"{values['output_throughput']:.1f}" for values in found)],
        ["Most requests at once", *(f"{values['max_concurrent_requests']}" for values in found)],
    ]
    for metric in METRICS:
        for which in ("mean", "median", "p95", "p99"):
            rows.append([f"{metric.upper()} {which}", *(f"{values[f'{which}_{metric}_ms']:.1f}" for values in found)])
    return html.table(["requests a second asked", *shown], rows)


def _milliseconds(label: str, value: float | None, extra: str) -> Bar:
    return Bar(label=label, value=value, text="not known" if value is None else _shown_ms(value), extra=extra)


def _shown_ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.0f} ms"


def _facts(result: Mapping[str, Any]) -> dict[str, object]:
    versions = ", ".join(f"{name.removesuffix('_version')} {result[name]}" for name in ("headrace_version", "torch_version", "python_version"))
    date = result["date"]
    when = f"{date[:4]}-{date[4:6]}-{date[6:8]} {date[9:11]}:{date[11:13]} UTC"
    return {"model": result.get("model"), "machine": result["machine"], "versions": versions, "when": when, "command": result["command"]}


def _load_words(found: Mapping[str, Any]) -> str:
    limit = f", at most {found['max_concurrency']} at a time" if found["max_concurrency"] else ""
    return f"{found['num_prompts']} requests{limit}"
