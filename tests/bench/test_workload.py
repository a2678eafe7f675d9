from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from headrace.bench.workload import arrivals, random_requests, read_requests, repeated, varied_requests
from headrace.errors import ConfigError


def test_lengths_are_drawn_around_theirs_and_the_same_each_time():
    requests = random_requests(200, input_len=50, output_len=20, range_ratio=0.5, prefix_len=10, seed=3)
    assert requests == random_requests(200, input_len=50, output_len=20, range_ratio=0.5, prefix_len=10, seed=3)
    assert requests != random_requests(200, input_len=50, output_len=20, range_ratio=0.5, prefix_len=10, seed=4)
    words = [len(request.prompt.split()) - 10 for request in requests]
    assert (min(words) >= 25, max(words) <= 75, abs(fmean(words) - 50) < 4) == (True, True, True)
    assert {request.max_tokens for request in requests} <= set(range(10, 31))
    assert len({tuple(request.prompt.split()[:10]) for request in requests}) == 1
    exact = random_requests(3, input_len=5, output_len=7)
    assert [(len(request.prompt.split()), request.max_tokens) for request in exact] == [(5, 7)] * 3
    with pytest.raises(ConfigError, match="random-range-ratio"):
        random_requests(1, input_len=1, output_len=1, range_ratio=1.0)


def test_arrivals_of_a_poisson_process_of_bursts_and_all_at_once():
    assert arrivals(4, rate=float("inf")) == [0.0] * 4
    poisson, even, bursts = (arrivals(4000, rate=10.0, burstiness=shape, seed=1) for shape in (1.0, 50.0, 0.2))
    spread = []
    for moments in (poisson, even, bursts):
        assert moments[0] == 0.0
        assert moments == sorted(moments)
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        assert fmean(gaps) == pytest.approx(0.1, rel=0.1)
        spread.append(pstdev(gaps) / fmean(gaps))
    assert spread == pytest.approx([1.0, 50**-0.5, 5**0.5], rel=0.12)


def test_a_rate_that_grows():
    for strategy in ("linear", "exponential"):
        moments = arrivals(2000, rate=1.0, burstiness=100.0, ramp_up=strategy, start_rate=10.0, end_rate=100.0)
        first, last = moments[100] - moments[0], moments[-1] - moments[-101]
        assert 5 < first / last < 12


def test_prompts_from_a_file(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b"}\n{"prompt": "c", "max_tokens": 9}\n')
    requests = read_requests(file, output_len=5)
    assert [(request.prompt, request.max_tokens) for request in requests] == [("a", 3), ("b", 5), ("c", 9)]
    assert [request.prompt for request in repeated(requests, 5)] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"text": "a"}', '{"prompt": ""}', '{"prompt": "a", "output_tokens": 0}', '{"prompt": 1}', ""])
def test_a_wrong_file_is_refused(tmp_path: Path, line: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError):
        read_requests(file, output_len=5)
    with pytest.raises(ConfigError, match="cannot read"):
        read_requests(tmp_path / "none", output_len=5)


def test_varied_lengths_have_their_median_and_a_long_tail():
    requests = varied_requests(1000, input_len=40, output_len=20, seed=3)
    for lengths, median in (([len(request.prompt.split()) for request in requests], 40), ([request.max_tokens for request in requests], 20)):
        ordered = sorted(lengths)
        assert ordered[500] == pytest.approx(median, rel=0.1)
        assert (ordered[0], ordered[-1]) == (median / 4, median * 4)
        assert sum(lengths) / 1000 == pytest.approx(1.3 * median, rel=0.1), "the mean lies above the median"
    assert requests == varied_requests(1000, input_len=40, output_len=20, seed=3)
    assert varied_requests(1, input_len=1, output_len=1)[0].max_tokens >= 1
