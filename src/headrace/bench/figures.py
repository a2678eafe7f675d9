"""The figures of a run, under the names that `vllm bench serve` writes them with."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.load import Run
from headrace.bench.sse_client import Record

METRICS: Mapping[str, str] = {
    "ttft": "Time to first token",
    "tpot": "Time per output token, without the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}

IDLE_KINDS = ("waiting", "idle")  # kinds of a server's time in which it is not busy
KEEPS_UP = 0.9  # share of what a server without a queue would do


def time_per_token(record: Record) -> float | None:
    """Seconds for each output token behind the first; None of an answer of one token."""
    if record.first is None or record.last is None or record.num_output_tokens < 2:
        return None
    return (record.last - record.first) / (record.num_output_tokens - 1)


def samples(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds, by metric, of the records that have ended well."""
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for record in records:
        assert record.first is not None
        assert record.last is not None
        found["ttft"].append(record.first - record.sent)
        found["e2el"].append(record.last - record.sent)
        found["itl"] += record.gaps
        if (tpot := time_per_token(record)) is not None:
            found["tpot"].append(tpot)
    return found


def meets(record: Record, goodput: Mapping[str, float]) -> bool:
    """Whether a request kept every limit of `goodput`: metric -> milliseconds."""
    if not record.ok:
        return False
    values = samples([record])
    return all(max(values[name], default=0.0) * 1e3 <= limit for name, limit in goodput.items())


def figures(run: Run, *, percentiles: Sequence[float] = (50, 90, 95, 99), goodput: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Latencies in milliseconds, throughput per second over the whole run. Failed requests count in `failed` and `errors` only."""
    good = [record for record in run.records if record.ok]
    num_input, num_output = sum(record.num_prompt_tokens for record in good), sum(record.num_output_tokens for record in good)
    seconds = max(run.seconds, 1e-9)
    values: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(meets(record, goodput) for record in good) / seconds if goodput else None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_concurrent_requests": most_at_once(good),
    }
    for name, seconds_of in samples(good).items():
        milliseconds = sorted(1e3 * value for value in seconds_of) or [0.0]
        values[f"mean_{name}_ms"] = statistics.fmean(milliseconds)
        values[f"median_{name}_ms"] = statistics.median(milliseconds)
        values[f"std_{name}_ms"] = statistics.pstdev(milliseconds)
        for share in percentiles:
            values[f"p{share:g}_{name}_ms"] = percentile(milliseconds, share)
    return values


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, between two of them in proportion (numpy's default)."""
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def details(run: Run) -> dict[str, Any]:
    """One entry for each request."""
    records = run.records
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [0.0 if record.first is None else record.first - record.sent for record in records],
        "itls": [record.gaps for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def most_at_once(records: Sequence[Record]) -> int:
    """The largest number of requests that were under way at one moment."""
    events = sorted(itertools.chain.from_iterable(((record.sent, 1), (record.last or record.sent, -1)) for record in records))
    return max(itertools.accumulate(change for _, change in events), default=0)


def knee(results: Sequence[tuple[float, int, float, Mapping[str, Any]]]) -> float | None:
    """The highest rate that the server kept up with; None where it kept up with none. `results`: rate, number of requests, moment of the last
    arrival in seconds, figures.

    A server that keeps up ends a run of n requests a latency after the last arrival; it must do at least 0.9 of the throughput that this gives,
    with the median latency of the lowest rate, without a failure and, where there is a goodput, counting good requests only.
    """
    if not results:
        return None
    latency = min(results, key=lambda result: result[0])[3]["median_e2el_ms"] / 1e3
    kept = []
    for rate, count, last_arrival, values in results:
        served = values["request_throughput"] if values["request_goodput"] is None else values["request_goodput"]
        if not values["failed"] and served >= KEEPS_UP * count / (last_arrival + latency):
            kept.append(rate)
    return max(kept, default=None)


def useful_share(work: Mapping[str, float] | None) -> float | None:
    """Of the time that a server was busy, by the kinds of `headrace_work_seconds_total`; None where it does not say."""
    if work is None:
        return None
    busy = sum(seconds for kind, seconds in work.items() if kind not in IDLE_KINDS)
    return work["useful"] / busy if busy else None
