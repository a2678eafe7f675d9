from __future__ import annotations

import pytest

from headrace.bench.traces import load_trace
from tests.scripts.load_script import load_script

plan_accuracy = load_script("plan_accuracy")


def test_a_load_is_the_trace_at_another_rate() -> None:
    trace = load_trace("poisson:rate=1,prompt=8,output=4,requests=500")
    part = plan_accuracy.scaled(trace, 10.0, 20.0)
    assert len(part.requests) == pytest.approx(200, rel=0.15)
    assert part.seconds < 20.0
    assert [request.num_prompt_tokens for request in part.requests] == [8] * len(part.requests)


def test_both_sides_stand_beside_each_other() -> None:
    real = {key: 2.0 for key, _ in plan_accuracy.SHOWN}
    lines = plan_accuracy.table("1 x", real, dict.fromkeys(real, 3.0), dict.fromkeys(real, 1.0)).splitlines()
    assert len(lines) == 1 + len(real)
    assert [float(cell) for cell in lines[1].split()[-5:]] == [2.0, 3.0, 1.5, 1.0, 0.5]


def test_flags_behind_the_dashes_are_the_servers() -> None:
    args = plan_accuracy.parse(["--loads", "0.5,2", "--", "--max-num-seqs", "8"])
    assert (args.loads, args.serve, args.flags.max_num_seqs) == ([0.5, 2.0], ["--max-num-seqs", "8"], 8)
