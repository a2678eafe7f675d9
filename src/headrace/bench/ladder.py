"""The rungs from a naive server to all of Headrace, each with one thing switched against the rung that it stands on, and what their figures say."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.bench.figures import useful_share
from headrace.bench.load import Run
from headrace.bench.workload import BenchRequest, random_requests

FORMAT = "headrace-ladder-1"
WINDOW_MS = 20
KEPT_TOKENS = 8192
SHARED_OWN_WORDS = 16  # of each prompt behind the shared context
SHARED_OUTPUT = 8
SUMMED = frozenset({"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"})  # of the figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    name: str
    title: str
    base: str | None  # the rung that it is compared with: the same but for what is switched
    server: Literal["small", "headrace"]
    flags: tuple[str, ...]  # behind the model
    words: str  # what is switched


def rungs(*, common: Sequence[str], clients: int, quantization: str | None) -> list[Rung]:
    """From the lowest up. `common`: flags of every rung. `quantization`: of the rung with quantised weights; None: there is none.

    All but that rung compute with the same weights in the same dtype by the same kernels.
    """
    plain = (*common, "--quantization", "none")
    batched = (*plain, "--max-batch", str(clients), "--window-ms", str(WINDOW_MS))
    wheel = ("--max-num-seqs", str(clients))
    found = [
        Rung(name="naive", title="naive", base=None, server="small", flags=plain, words="one request after the other, answered as it is computed"),
        Rung(
            name="dynamic",
            title="dynamic batching",
            base="naive",
            server="small",
            flags=batched,
            words=f"requests that come within {WINDOW_MS} ms are computed together; the batch stays until its longest answer has ended",
        ),
        Rung(
            name="dynamic-reuse",
            title="dynamic + prefix reuse",
            base="dynamic",
            server="small",
            flags=(*batched, "--kept-tokens", str(KEPT_TOKENS)),
            words=f"keys and values of the latest {KEPT_TOKENS:,} prompt tokens are kept, and copied to prompts that begin alike",
        ),
        Rung(
            name="continuous",
            title="continuous batching",
            base="dynamic",
            server="headrace",
            flags=(*plain, *wheel, "--no-enable-prefix-caching"),
            words="Headrace: requests enter and leave at every step, keys and values stand in blocks, long prompts are computed in parts",
        ),
        Rung(
            name="prefix-cache",
            title="continuous + prefix cache",
            base="continuous",
            server="headrace",
            flags=(*plain, *wheel),
            words="blocks of prompts are found again, without a copy and while their request still runs",
        ),
    ]
    if quantization is not None:
        found.append(
            Rung(
                name="quantized",
                title=f"continuous + cache + {quantization} weights",
                base="prefix-cache",
                server="headrace",
                flags=(*common, "--quantization", quantization, *wheel),
                words="products read the weights in their blocks of few bits, and keys and values are stored as float16",
            )
        )
    return found


def chosen(available: Sequence[Rung], names: Sequence[str]) -> list[Rung]:
    """Those of the names, in the order of the ladder. ValueError names one that is not known."""
    known = {rung.name: rung for rung in available}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no rung {name} here; use {', '.join(known)}")
    return [rung for rung in available if rung.name in names]


def shared_context_requests(count: int, *, words: int, seed: int) -> list[BenchRequest]:
    """Prompts that all begin with the same context of about so many tokens."""
    return random_requests(count, input_len=SHARED_OWN_WORDS, output_len=SHARED_OUTPUT, prefix_len=words, seed=seed)


def shared_context_figures(run: Run) -> dict[str, Any]:
    """Of requests one after the other: the first finds nothing, the others may find its context. Times in milliseconds."""
    times = [1e3 * (record.first - record.sent) for record in run.records if record.ok and record.first is not None]
    errors = sorted({record.error for record in run.records if record.error})
    return {
        "prompt_tokens": max(record.num_prompt_tokens for record in run.records),
        "first_ttft_ms": times[0] if times else None,
        "median_ttft_ms": statistics.median(times[1:]) if len(times) > 1 else None,
        "ttfts_ms": times,
        "errors": errors,
    }


def joined(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One rung's results of several rounds as one: counts and seconds summed, all else the median, so that a disturbed round doesn't decide.

    `rounds` has each one's requests per second and TTFT behind the shared context, `spread` how far the former lie apart, of the median; None of
    one round.
    """
    last, figures = rounds[-1], {}
    for key, value in last["figures"].items():
        values = [one["figures"][key] for one in rounds]
        figures[key] = sum(values) if key in SUMMED else statistics.median(values) if isinstance(value, int | float) else value
    times = [one["shared_context"]["median_ttft_ms"] for one in rounds]
    rates = [one["figures"]["request_throughput"] for one in rounds]
    known = [time for time in times if time is not None]
    shared = {
        "first_ttft_ms": statistics.median(first) if (first := [x for one in rounds if (x := one["shared_context"]["first_ttft_ms"])]) else None,
        "median_ttft_ms": statistics.median(known) if known else None,
        "ttfts_ms": [time for one in rounds for time in one["shared_context"]["ttfts_ms"]],
        "errors": sorted({error for one in rounds for error in one["shared_context"]["errors"]}),
    }
    work = [one["work"] for one in rounds if one["work"] is not None]
    memory = [one["peak_memory_bytes"] for one in rounds if one["peak_memory_bytes"] is not None]
    total = {kind: sum(each[kind] for each in work) for kind in work[0]} if work else None
    return {
        **last,
        "start_seconds": statistics.median(one["start_seconds"] for one in rounds),
        "figures": figures,
        "shared_context": last["shared_context"] | shared,
        "work": total,
        "useful_share": useful_share(total),
        "peak_memory_bytes": max(memory, default=None),
        "rounds": [{"request_throughput": rate, "shared_ttft_ms": time} for rate, time in zip(rates, times, strict=True)],
        "spread": (max(rates) - min(rates)) / statistics.median(rates) if len(rates) > 1 and min(rates) else None,
    }


def with_ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of rungs, each with what it gained over its base and over the lowest rung that ran, as the median over the rounds of each round's
    ratio; None where that can't be said."""
    by_name = {result["name"]: result for result in results}
    return [result | {"over_base": _gains(result, by_name.get(result["base"])), "over_lowest": _gains(result, results[0])} for result in results]


def _gains(result: Mapping[str, Any], other: Mapping[str, Any] | None) -> dict[str, float | None]:
    def ratio(of: str, *, inverse: bool = False) -> float | None:
        pairs = [(one[of], two[of]) for one, two in zip(result["rounds"], other["rounds"] if other is not None else (), strict=False)]
        ratios = [two / one if inverse else one / two for one, two in pairs if one and two]
        return statistics.median(ratios) if ratios else None

    return {"request_throughput": ratio("request_throughput"), "shared_ttft": ratio("shared_ttft_ms", inverse=True)}


COLUMNS = ("req/s", "spread", "x base", "E2E P50", "P95", "P99", "TTFT P50", "P95", "ITL P50", "shared TTFT", "x base", "useful", "MiB")


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One line a rung. Latencies in seconds, ITL and the TTFT behind a shared context in milliseconds."""
    titles = {result["name"]: f"{number}. {result['title']}" for number, result in enumerate(results, start=1)}
    width = max(len(title) for title in titles.values()) + 2
    widths = [max(len(column), 6) + 2 for column in COLUMNS]
    lines = [" " * width + "".join(f"{column:>{size}}" for column, size in zip(COLUMNS, widths, strict=True))]
    for result in results:
        cells = cells_of(result)
        lines.append(f"{titles[result['name']]:<{width}}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, widths, strict=True)))
    lines.append(
        "Medians of the rounds; spread: highest req/s less lowest; E2E and TTFT in s, ITL and shared TTFT in ms; useful: share of busy time; "
        "MiB: peak of all its processes; base: the rung it changes:"
    )
    for result in results:
        base = f"against {titles[result['base']]}: " if result["base"] in titles else ""
        lines += [f"  {titles[result['name']]}: {base}{result['words']}", f"      {result['command']}"]
    return "\n".join(lines)


def cells_of(result: Mapping[str, Any]) -> list[str]:
    """What stands below `COLUMNS`."""
    found, shared, gains = result["figures"], result["shared_context"], result["over_base"]

    def text(value: float | None, form: str, factor: float = 1.0) -> str:
        return "-" if value is None else format(value * factor, form)

    return [
        text(found["request_throughput"], ".2f"),
        text(result["spread"], ".0%"),
        text(gains["request_throughput"], ".2f"),
        *(text(found[name], ".2f", 1e-3) for name in ("median_e2el_ms", "p95_e2el_ms", "p99_e2el_ms", "median_ttft_ms", "p95_ttft_ms")),
        text(found["median_itl_ms"], ".0f"),
        text(shared["median_ttft_ms"], ".0f"),
        text(gains["shared_ttft"], ".1f"),
        text(result["useful_share"], ".0%"),
        text(result["peak_memory_bytes"], ".0f", 1 / 2**20),
    ]
