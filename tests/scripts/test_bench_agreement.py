from __future__ import annotations

from pathlib import Path

from headrace.bench.workload import read_requests
from tests.scripts.load_script import load_script

bench_agreement = load_script("bench_agreement")


def test_our_client_reads_the_work(tmp_path: Path):
    bench_agreement.write_work(tmp_path / "work.jsonl", 3, 5)
    requests = read_requests(tmp_path / "work.jsonl", output_len=99)
    assert [request.max_tokens for request in requests] == [5, 5, 5]
    assert len({request.prompt for request in requests}) == 3, "no prompt is found in the prefix cache"


def test_their_figures():
    metrics = {name: {"successful": {"median": value}} for name, value in (("time_to_first_token_ms", 30.0), ("inter_token_latency_ms", 7.0))}
    requests = [{"request_start_time": begin, "request_end_time": begin + 2.0, "output_tokens": 10} for begin in (100.0, 103.0)]
    assert bench_agreement.round_of(metrics, requests) == (4.0, 30.0, 7.0)


def test_agreement():
    ours = [(100.0, 50.0, 10.0), (102.0, 55.0, 10.2), (101.0, 51.0, 10.1)]
    table, agree = bench_agreement.compared(ours, ours)
    assert agree
    assert table.splitlines()[2] == "| output tokens/s | 101.00 (100.00 to 102.00) | 101.00 (100.00 to 102.00) | +0.0% |"
    _, agree = bench_agreement.compared(ours, [(100.0, 50.0, 12.0)])
    assert not agree
