"""Figures as text for a terminal."""

from __future__ import annotations

import statistics
from typing import Any

from headrace.bench.figures import METRICS, knee, useful_share

RATIOS = (
    ("request_throughput", "requests/s"),
    ("output_throughput", "output tokens/s"),
    ("median_ttft_ms", "TTFT P50, ms"),
    ("p95_ttft_ms", "TTFT P95, ms"),
    ("median_itl_ms", "ITL P50, ms"),
    ("p99_itl_ms", "ITL P99, ms"),
    ("p95_e2el_ms", "latency P95, ms"),
)


def table(found: dict[str, Any]) -> str:
    """The figures of one run, as text."""
    rows = [
        ("Successful requests", f"{found['completed']}"),
        ("Failed requests", f"{found['failed']}"),
        ("Duration, s", f"{found['duration']:.2f}"),
        ("Prompt tokens", f"{found['total_input_tokens']}"),
        ("Output tokens", f"{found['total_output_tokens']}"),
        ("Requests/s", f"{found['request_throughput']:.3f}"),
    ]
    if found["request_goodput"] is not None:
        rows.append(("Good requests/s", f"{found['request_goodput']:.3f}"))
    rows += [
        ("Output tokens/s", f"{found['output_throughput']:.1f}"),
        ("All tokens/s", f"{found['total_token_throughput']:.1f}"),
        ("Most requests at once", f"{found['max_concurrent_requests']}"),
    ]
    if (share := useful_share(found["work_seconds"])) is not None:
        rows.append(("Useful share of the server's busy time", f"{share:.1%}"))
    lines = [f"{found['base_url']}  {found['model_id']}  {found['num_prompts']} requests at {found['request_rate']}/s"]
    lines += [f"  {name:<40}{value:>12}" for name, value in rows]
    for name, words in METRICS.items():
        shown = [key for key in found if key.endswith(f"_{name}_ms")]
        parts = ", ".join(f"{key.removesuffix(f'_{name}_ms')} {found[key]:.2f}" for key in shown)
        lines.append(f"  {words}, ms: {parts}")
    return "\n".join(lines)


def sweep_table(results: list[tuple[float, int, float, dict[str, Any]]]) -> str:
    lines = ["rate/s    served/s  good/s   TTFT P50  TTFT P95  ITL P50  ITL P99  (ms)"]
    for rate, _, _, found in results:
        good = "-" if found["request_goodput"] is None else f"{found['request_goodput']:.2f}"
        times = [found[name] for name in ("median_ttft_ms", "p95_ttft_ms", "median_itl_ms", "p99_itl_ms")]
        lines.append(f"{rate:<10g}{found['request_throughput']:<10.2f}{good:<9}" + "".join(f"{value:<9.1f} " for value in times).rstrip())
    at = knee(results)
    lines.append("It keeps up with none of these rates." if at is None else f"It keeps up with up to {at:g} requests/s.")
    return "\n".join(lines)


def comparison(rounds: list[list[dict[str, Any]]]) -> str:
    """Medians of both sides and their ratio in each round: median, and from the lowest to the highest."""
    lines = [f"{'':<18}{rounds[0][0]['base_url']:>26}{rounds[1][0]['base_url']:>26}  ratio (spread)"]
    for key, words in RATIOS:
        sides = [[found[key] for found in side] for side in rounds]
        ratios = [one / other for one, other in zip(*sides, strict=True) if other]
        medians = [statistics.median(side) for side in sides]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
        lines.append(f"{words:<18}{medians[0]:>26.2f}{medians[1]:>26.2f}  {ratio}")
    return "\n".join(lines)
