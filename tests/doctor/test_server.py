from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from headrace.doctor import server
from headrace.doctor.server import CHECKS, ServerFacts, parse_metrics, time_findings
from headrace.observe.metrics import Metrics

STATUS: dict[str, Any] = {
    "state": "ready",
    "engine_restarts_total": 0,
    "first_tokens_total": 1000,
    "engine": {
        "kv_blocks": {"total": 100, "used": 50, "cached": 20, "free": 30},
        "waiting": 0,
        "preemptions_total": 3,
        "recomputed_tokens_total": 40,
        "remarks": [],
    },
}
READY: dict[str, Any] = {
    "status": "ready",
    "path": "eager, packed GGUF weights (avx2)",
    "compile": {"paths": [{"name": "decode-1", "state": "compiled", "reason": None}]},
}
METRICS = {
    'headrace_prefix_cache_hits_total{model_name="m"}': 60_000.0,
    'headrace_prefix_cache_miss_tokens_total{cause="new"}': 30_000.0,
    'headrace_prefix_cache_miss_tokens_total{cause="evicted"}': 1_000.0,
    'headrace_prefix_cache_miss_tokens_total{cause="other_salt"}': 1_000.0,
    'headrace_prefix_cache_miss_tokens_total{cause="partial"}': 8_000.0,
    'headrace_kv_cache_positions_total{content="token"}': 90_000.0,
    'headrace_kv_cache_positions_total{content="nothing"}': 10_000.0,
    'headrace_steps_total{path="compiled"}': 950.0,
    'headrace_steps_total{path="ready"}': 50.0,
    "headrace_recompiles_total": 0.0,
}


def facts(change: Callable[[dict[str, Any], dict[str, Any], dict[str, float]], object] = lambda status, ready, metrics: None) -> ServerFacts:
    status, ready, metrics = deepcopy(STATUS), deepcopy(READY), dict(METRICS)
    change(status, ready, metrics)
    return ServerFacts(status=status, ready=ready, metrics=metrics)


MISSES = "headrace_prefix_cache_miss_tokens_total"
POSITIONS = "headrace_kv_cache_positions_total"
PLANTED: list[tuple[Callable[[ServerFacts], Any], Callable[..., object], str]] = [
    (server.readiness, lambda s, r, m: s.update(state="restarting"), "restarting"),
    (server.restarts, lambda s, r, m: s.update(engine_restarts_total=2), "2 times"),
    (server.kernels, lambda s, r, m: r.update(path="eager, torch operators (no CPU kernels)"), "torch operators"),
    (
        server.compiled_paths,
        lambda s, r, m: r["compile"]["paths"].append({"name": "decode-4", "state": "failed", "reason": "boom"}),
        "decode-4: boom",
    ),
    (server.recompiles, lambda s, r, m: m.update(headrace_recompiles_total=3.0), "3 compilations"),
    (server.bucket_misses, lambda s, r, m: m.update({'headrace_steps_total{path="ready"}': 950.0}), "50% of 1900"),
    (server.preemptions, lambda s, r, m: s["engine"].update(preemptions_total=300), "300 preemptions"),
    (server.kv_blocks, lambda s, r, m: (s["engine"]["kv_blocks"].update(used=99), s["engine"].update(waiting=4)), "99 of 100"),
    (
        server.prefix_cache,
        lambda s, r, m: m.update({MISSES + '{cause="other_salt"}': 51_000.0}),
        "34% under another salt",
    ),
    (server.prefix_cache, lambda s, r, m: m.update({MISSES + '{cause="evicted"}': 51_000.0}), "34% evicted"),
    (server.kv_fragmentation, lambda s, r, m: m.update({POSITIONS + '{content="nothing"}': 60_000.0}), "40% of the positions"),
]


@pytest.mark.parametrize(("check", "change", "evidence"), PLANTED)
def test_a_planted_fault_is_found_by_its_check_alone(check: Callable[[ServerFacts], Any], change: Callable[..., object], evidence: str):
    sick = facts(change)
    found = [finding for finding in (other(sick) for other in CHECKS) if not finding.ok]
    assert found == [check(sick)]
    assert evidence in found[0].evidence
    assert found[0].remedy


def test_a_healthy_server_is_left_alone():
    assert all(check(facts()).ok for check in CHECKS)
    assert [finding.ok for finding in time_findings(facts())] == [True]
    few = facts(lambda s, r, m: m.update({'headrace_steps_total{path="compiled"}': 5.0}))
    assert server.bucket_misses(few).ok, "too few steps to say anything"
    fresh = facts(lambda s, r, m: (s.update(engine=None), r.pop("compile"), m.clear()))
    assert all(check(fresh).ok for check in CHECKS)


def test_what_the_server_remarks_is_passed_on():
    remark = {"kind": "padding", "share": 0.42, "text": "42% of busy time is padding."}
    (finding,) = time_findings(facts(lambda s, r, m: s["engine"]["remarks"].append(remark)))
    assert (finding.check, finding.ok, finding.evidence, finding.gain) == ("time-padding", False, remark["text"], "up to 42% of the time")


def test_the_metrics_that_are_looked_at_are_there():
    text = Metrics(model_name="m").render(None, state="ready")[0].decode()
    assert set(METRICS) <= set(parse_metrics(text))
