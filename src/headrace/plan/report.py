"""A plan's answer as text and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.bench.figures import METRICS
from headrace.bench.traces import Trace
from headrace.plan.fleet import Fleet
from headrace.plan.slo import Limit

HOURS_A_MONTH = 730.0


def cost_of(fleet: Fleet, price: float) -> dict[str, float]:
    """`price`: of an engine's device for an hour, in any currency."""
    hour = price * fleet.replicas
    tokens = fleet.num_output_tokens / max(fleet.seconds, 1e-9) * 3600.0
    return {"per_hour": hour, "per_month": hour * HOURS_A_MONTH, "per_million_output_tokens": hour / tokens * 1e6 if tokens else 0.0}


def answer(
    trace: Trace, fleet: Fleet | None, limits: Sequence[Limit], *, assumptions: Sequence[str], price: float | None, tried: Sequence[int]
) -> dict[str, Any]:
    lengths = [(request.num_prompt_tokens, request.num_output_tokens) for request in trace.requests]
    return {
        "object": "plan",
        "trace": {
            "name": trace.name,
            "requests": len(lengths),
            "left_out": trace.num_left_out,
            "seconds": trace.seconds,
            "mean_prompt_tokens": sum(prompt for prompt, _ in lengths) / len(lengths),
            "mean_output_tokens": sum(output for _, output in lengths) / len(lengths),
        },
        "slo": [str(limit) for limit in limits],
        "assumptions": list(assumptions),
        "tried_replicas": list(tried),
        "figures": None if fleet is None else fleet.figures(),
        "cost": None if fleet is None or price is None else cost_of(fleet, price),
    }


def text(found: dict[str, Any]) -> str:
    """What `answer` found, for a terminal."""
    trace, figures = found["trace"], found["figures"]
    lines = [f"Trace {trace['name']}: {trace['requests']} requests in {trace['seconds']:.1f} s"]
    lines[0] += f", {trace['left_out']} without an answer left out" if trace["left_out"] else ""
    lines.append(f"  mean prompt {trace['mean_prompt_tokens']:.0f} tokens, mean answer {trace['mean_output_tokens']:.0f}")
    lines += ["Assumptions", *(f"  {line}" for line in found["assumptions"])]
    if figures is None:
        lines.append(f"No number of engines up to {max(found['tried_replicas'])} keeps {', '.join(found['slo'])}: one request alone takes longer.")
        return "\n".join(lines)
    verdict = f"{figures['replicas']} engine{'s' * (figures['replicas'] != 1)}"
    if found["slo"]:
        kept = not figures["missed"] and not figures["failed"]
        verdict += (
            f": keep{'s' * (figures['replicas'] == 1)} {', '.join(found['slo'])}"
            if kept
            else f": MISSED {', '.join(figures['missed']) or 'requests fail'}"
        )
    lines.append(verdict)
    rows = [
        ("Requests/s", f"{figures['request_throughput']:.3f}"),
        ("Good requests/s (each limit kept)", f"{figures['request_goodput']:.3f}") if found["slo"] else None,
        ("Failed requests", ", ".join([str(figures["failed"]), *(f"{count} {why}" for why, count in figures["errors"].items())])),
        ("Output tokens/s", f"{figures['output_throughput']:.1f}"),
        ("Busy, share of the time", f"{100 * figures['busy_share']:.1f} %"),
        ("Tokens a step", f"{figures['tokens_per_step']:.1f}"),
        ("KV blocks held, mean / peak", f"{100 * figures['kv_mean_share']:.1f} % / {100 * figures['kv_peak_share']:.1f} %"),
        ("Preemptions", f"{figures['preemptions']} ({figures['recomputed_tokens']} tokens computed again)"),
        ("Prompt tokens from the prefix cache", f"{figures['cached_tokens']} of {figures['total_input_tokens']}"),
    ]
    lines += [f"  {name:<40}{value}" for name, value in filter(None, rows)]
    for name, words in METRICS.items():
        if f"mean_{name}_ms" in figures:
            shown = ("mean", "p50", "p90", "p95", "p99")
            lines.append(f"  {words}, ms: " + ", ".join(f"{key} {figures[f'{key}_{name}_ms']:.1f}" for key in shown))
    if found["cost"]:
        cost = found["cost"]
        parts = (
            f"{cost['per_hour']:.2f} an hour",
            f"{cost['per_month']:.0f} a month",
            f"{cost['per_million_output_tokens']:.3f} a million output tokens",
        )
        lines.append("  Cost: " + ", ".join(parts))
    return "\n".join(lines)
