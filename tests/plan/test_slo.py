from __future__ import annotations

import pytest

from headrace.plan.slo import Limit, kept_share, misses, parse_slo


def test_limits_are_read() -> None:
    assert parse_slo("p95_ttft=300ms, mean_itl=0.05s,median_e2e=2s,p99.9_tpot=80ms") == (
        Limit(metric="ttft", share=95.0, seconds=0.3),
        Limit(metric="itl", share=None, seconds=0.05),
        Limit(metric="e2el", share=50.0, seconds=2.0),
        Limit(metric="tpot", share=99.9, seconds=0.08),
    )
    assert str(parse_slo("p95_ttft=0.3s")[0]) == "p95_ttft=300ms"


@pytest.mark.parametrize("text", ["", "p95_ttft", "p95_ttft=300", "ttft=300ms", "p100_ttft=1s", "p95_speed=1s", "p95_ttft=0ms", "p95_ttft=-1s"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use p95_ttft=300ms"):
        parse_slo(text)


def test_so_many_may_be_late_before_the_percentile_surely_is() -> None:
    for count in (1, 7, 20, 100, 101):
        for share in (50.0, 95.0, 99.0):
            limit = Limit(metric="ttft", share=share, seconds=1.0)
            allowed = limit.allowed(count)
            values = [0.0] * (count - allowed - 1) + [5.0] * (allowed + 1)
            assert limit.value(values) > 1.0
            assert allowed == 0 or limit.value([0.0] * (count - allowed) + [1.0] * allowed) <= 1.0


def test_what_is_missed_and_by_how_much() -> None:
    limits = parse_slo("p95_ttft=300ms,p95_itl=50ms")
    assert misses(limits, {"p95_ttft": 0.3, "p95_itl": 0.06}) == [limits[1]]
    assert kept_share(limits, {"p95_ttft": 0.1, "p95_itl": 0.1}) == 0.5
    assert kept_share(limits, {"p95_ttft": 0.1, "p95_itl": 0.0}) == 1.0
