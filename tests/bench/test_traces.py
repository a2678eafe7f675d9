from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from headrace.bench.traces import TracedRequest, bench_request, load_trace
from headrace.errors import ConfigError


def trace(tmp_path: Path, text: str, name: str = "trace"):
    path = tmp_path / name
    path.write_text(text)
    return load_trace(str(path))


def test_our_lines(tmp_path: Path) -> None:
    found = trace(
        tmp_path,
        '{"arrival": 101.5, "prompt_tokens": 30, "output_tokens": 4, "prefix": "s", "prefix_tokens": 20, "tenant": "a"}\n\n'
        '{"arrival": 100, "prompt_tokens": 7, "output_tokens": 2}\n{"arrival": 102, "prompt_tokens": 7, "output_tokens": 0}\n',
    )
    assert found.requests == (
        TracedRequest(arrival=0.0, num_prompt_tokens=7, num_output_tokens=2),
        TracedRequest(arrival=1.5, num_prompt_tokens=30, num_output_tokens=4, prefix="s", num_prefix_tokens=20, tenant="a"),
    )
    assert (found.num_left_out, found.seconds) == (1, 1.5)


def test_azure_columns(tmp_path: Path) -> None:
    found = trace(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
    )
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in found.requests] == [(4808, 10), (3180, 8)]
    assert found.seconds == pytest.approx(0.052, abs=1e-5)


def test_burstgpt_columns(tmp_path: Path) -> None:
    """A request that failed there has no response."""
    found = trace(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n118,GPT-4,417,276,693,API log\n",
    )
    assert [(request.arrival, request.num_prompt_tokens, request.num_output_tokens) for request in found.requests] == [(0, 472, 18), (113, 417, 276)]
    assert found.num_left_out == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "columns of nothing"),
        ("a,b\n1,2\n", "TIMESTAMP, ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", ":2: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-1,2\n", ":2: ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5\n", ":2: GeneratedTokens"),
        ("Timestamp,Request tokens,Response tokens\nnan,1,2\n", ":2: Timestamp"),
        ("{nonsense\n", ":1 is no JSON object"),
        ('{"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}\n', ":1: prompt_tokens"),
        ('{"arrival": true, "prompt_tokens": 1, "output_tokens": 1}\n', ":1: arrival"),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 1, "prefix": "x"}\n', "prefix and prefix_tokens go together"),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 1, "prompt": "x"}\n', "unknown field 'prompt'"),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 0}\n', "no request with an answer"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace(tmp_path, text)
    assert named in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_made_up_traces() -> None:
    found = load_trace("poisson:rate=5,prompt=100,output=20,requests=2000,sigma=0.5,prefix=30,seed=3")
    assert len(found.requests) == 2000
    assert 2000 / found.seconds == pytest.approx(5.0, rel=0.1)
    assert statistics.median(request.num_prompt_tokens - 30 for request in found.requests) == pytest.approx(100, rel=0.05)
    assert {request.num_prefix_tokens for request in found.requests} == {30}
    assert found == load_trace("poisson:rate=5,prompt=100,output=20,requests=2000,sigma=0.5,prefix=30,seed=3")
    assert found.faster(2.0).first(10).seconds == pytest.approx(found.first(10).seconds / 2)
    burst = load_trace("burst:prompt=8,output=2,requests=3")
    assert [(request.arrival, request.num_prompt_tokens) for request in burst.requests] == [(0.0, 8)] * 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("poisson:rate=1,prompt=8", "needs output"),
        ("poisson:rate=0,prompt=8,output=1", "rate must be above 0"),
        ("poisson:rate=x,prompt=8,output=1", "rate must be a number"),
        ("burst:rate=1,prompt=8,output=1", "has no 'rate'"),
        ("no such file", "cannot read"),
    ],
)
def test_wrong_made_up_traces(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_trace(text)


def test_prompts_of_a_trace_share_what_the_trace_says() -> None:
    one, other = (
        bench_request(TracedRequest(arrival=0.0, num_prompt_tokens=12, num_output_tokens=5, prefix="p", num_prefix_tokens=8), number)
        for number in (1, 2)
    )
    assert one.prompt.split()[:8] == other.prompt.split()[:8]
    assert one.prompt.split()[8:] != other.prompt.split()[8:]
    assert (len(one.prompt.split()), one.max_tokens) == (12, 5)
