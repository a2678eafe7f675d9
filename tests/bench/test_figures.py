from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.figures import details, figures, knee, meets, most_at_once
from headrace.bench.load import Run
from headrace.bench.report import comparison, sweep_table
from headrace.bench.sse_client import Record

# the names that `vllm bench serve` writes, which other tools read
VLLM_KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
} | {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")}


def record(sent: float, first: float, gaps: list[float], **fields: Any) -> Record:
    values = {"num_prompt_tokens": 10, "num_output_tokens": len(gaps) + 1} | fields
    return Record(sent=sent, first=first, last=first + sum(gaps), gaps=gaps, **values)


def test_the_figures_of_a_run():
    records = (record(0.0, 0.2, [0.1, 0.3]), record(1.0, 1.4, [0.1] * 4), Record(sent=1.0, error="no"))
    found = figures(Run(records=records, seconds=4.0), percentiles=(50, 95, 99), goodput={"ttft": 300.0, "itl": 350.0})
    assert set(found) >= VLLM_KEYS
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (2, 1, 20, 8)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.5, 2.0, 7.0)
    assert found["request_goodput"] == 0.25, "the second was too late"
    assert found["median_ttft_ms"] == pytest.approx(300.0)
    assert found["mean_tpot_ms"] == pytest.approx((200.0 + 100.0) / 2)
    assert found["p99_itl_ms"] == pytest.approx(290.0)
    assert found["mean_e2el_ms"] == pytest.approx((600.0 + 800.0) / 2)
    assert found["std_ttft_ms"] == pytest.approx(100.0)
    assert details(Run(records=records, seconds=4.0))["errors"] == ["", "", "no"]


def test_pieces_of_several_tokens_count_by_usage():
    found = figures(Run(records=(record(0.0, 0.2, [0.4], num_output_tokens=9),), seconds=1.0))
    assert (found["mean_tpot_ms"], found["mean_itl_ms"]) == (pytest.approx(50.0), pytest.approx(400.0))
    assert found["output_throughput"] == 9.0


def test_a_run_without_success_has_figures():
    found = figures(Run(records=(Record(sent=0.0, error="no"),), seconds=0.0))
    assert (found["completed"], found["median_ttft_ms"], found["request_goodput"]) == (0, 0.0, None)


def test_a_failed_request_meets_nothing_and_one_token_has_no_time_between():
    assert not meets(Record(sent=0.0, error="no"), {})
    assert meets(record(0.0, 0.1, []), {"tpot": 1.0, "itl": 1.0})


def test_how_many_were_under_way():
    assert most_at_once([record(0.0, 0.5, []), record(0.2, 0.4, []), record(0.45, 0.9, [])]) == 2
    assert most_at_once([]) == 0


def result(rate: float, throughput: float, **fields: Any) -> tuple[float, int, float, dict[str, Any]]:
    values = {"request_throughput": throughput, "request_goodput": None, "failed": 0, "median_e2el_ms": 1000.0, "median_ttft_ms": 1.0}
    return rate, 100, 100 / rate, values | {"p95_ttft_ms": 1.0, "median_itl_ms": 1.0, "p99_itl_ms": 1.0} | fields


def test_the_knee_is_the_last_rate_that_is_served():
    results = [result(1.0, 0.99), result(2.0, 1.95), result(4.0, 3.7), result(8.0, 4.1)]
    assert knee(results) == 4.0
    assert knee([result(1.0, 0.99, failed=1), result(2.0, 1.0)]) is None
    assert knee([result(1.0, 0.99, request_goodput=0.95), result(2.0, 1.95, request_goodput=0.9)]) == 1.0
    assert knee([]) is None
    assert "up to 4 requests/s" in sweep_table(results)


def test_two_servers_are_compared_by_the_ratio_of_each_round():
    def side(url: str, throughputs: list[float]) -> list[dict[str, Any]]:
        names = ("median_ttft_ms", "p95_ttft_ms", "median_itl_ms", "p99_itl_ms", "p95_e2el_ms")
        return [{"base_url": url, "request_throughput": value, "output_throughput": value, **dict.fromkeys(names, 1.0)} for value in throughputs]

    text = comparison([side("http://a", [2.0, 3.0, 4.0]), side("http://b", [1.0, 2.0, 1.0])])
    (line,) = [line for line in text.splitlines() if line.startswith("requests/s")]
    assert line.endswith("2.00 (1.50-4.00)")
