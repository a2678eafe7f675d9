"""The rungs from a naive server to all of Headrace, each with one thing switched against the rung that it stands on, and what their figures say."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.bench.load import Run
from headrace.bench.workload import BenchRequest, random_requests

FORMAT = "headrace-ladder-1"
WINDOW_MS = 20
KEPT_TOKENS = 8192
SHARED_OWN_WORDS = 16  # of each prompt behind the shared context
SHARED_OUTPUT = 8


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


def with_ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of rungs, each with what it gained over its base and over the lowest rung that ran; None where that can't be said."""
    by_name = {result["name"]: result for result in results}
    return [result | {"over_base": _gains(result, by_name.get(result["base"])), "over_lowest": _gains(result, results[0])} for result in results]


def _gains(result: Mapping[str, Any], other: Mapping[str, Any] | None) -> dict[str, float | None]:
    def ratio(one: float | None, two: float | None) -> float | None:
        return one / two if one and two else None

    if other is None:
        return {"request_throughput": None, "shared_ttft": None}
    return {
        "request_throughput": ratio(result["figures"]["request_throughput"], other["figures"]["request_throughput"]),
        "shared_ttft": ratio(other["shared_context"]["median_ttft_ms"], result["shared_context"]["median_ttft_ms"]),
    }


COLUMNS = ("req/s", "x base", "E2E P50", "P95", "P99", "TTFT P50", "P95", "ITL P50", "shared TTFT", "x base", "useful", "MiB")


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
        "E2E and TTFT in s, ITL and shared TTFT in ms; useful: share of busy time; MiB: peak of all its processes; base: the rung it changes:"
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
        text(gains["request_throughput"], ".2f"),
        *(text(found[name], ".2f", 1e-3) for name in ("median_e2el_ms", "p95_e2el_ms", "p99_e2el_ms", "median_ttft_ms", "p95_ttft_ms")),
        text(found["median_itl_ms"], ".0f"),
        text(shared["median_ttft_ms"], ".0f"),
        text(gains["shared_ttft"], ".1f"),
        text(result["useful_share"], ".0%"),
        text(result["peak_memory_bytes"], ".0f", 1 / 2**20),
    ]
