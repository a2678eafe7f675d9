"""The client against a server whose delays are known."""

from __future__ import annotations

from itertools import accumulate

import pytest

from headrace.bench.load import Run, run_load
from headrace.bench.sse_client import Target
from headrace.bench.workload import BenchRequest
from headrace.errors import ConfigError
from tests.bench.scripted_server import ScriptedServer, scripted_server
from tests.patience import LIMIT_S


async def load(
    server: ScriptedServer, count: int, *, tokens: int = 5, moments: list[float] | None = None, endpoint: str = "/v1/completions", **rest
) -> Run:
    target = Target(server.url, endpoint=endpoint)
    requests = [BenchRequest(prompt=f"p{i}", max_tokens=tokens) for i in range(count)]
    return await run_load(target, requests, moments or [0.0] * count, model="m", timeout=LIMIT_S, **rest)


async def test_what_is_measured_is_what_was_written():
    with scripted_server(first_s=0.03, gap_s=0.01) as server:
        run = await load(server, 1, tokens=60)
    (record,), (written,) = run.records, server.written
    assert (record.error, record.num_prompt_tokens, record.num_output_tokens, record.text) == (None, 7, 60, "x " * 60)
    assert len(record.gaps) == 59
    assert record.first is not None
    read = list(accumulate(record.gaps, initial=record.first))
    assert all(moment >= before for moment, before in zip(read, written, strict=True)), "never earlier than it was written"
    assert read[0] < written[-1], "and not all at the end"
    assert record.first - record.sent >= 0.03


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_asked(endpoint: str):
    with scripted_server() as server:
        await load(server, 1, endpoint=endpoint, extra={"temperature": 0, "ignore_eos": None})
    (body,) = server.asked
    asked = {"messages": [{"role": "user", "content": "p0"}]} if "chat" in endpoint else {"prompt": "p0"}
    assert body == {"model": "m", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0} | asked
    assert server.paths == [endpoint]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("status", "status 429.*too many"),
        ("cut", "ended before its end"),
        ("event", "the engine died"),
        ("json", "no JSON"),
        ("silence", "without a token"),
    ],
)
async def test_a_failure_is_told_and_fails_nobody_else(fault: str, words: str):
    with scripted_server(fault=fault) as server:
        run = await load(server, 2)
    assert [record.ok for record in run.records] == [False, False]
    for record in run.records:
        assert record.error is not None
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(record.error)


async def test_without_usage_pieces_are_counted():
    with scripted_server(fault="usage") as server:
        (record,) = (await load(server, 1, tokens=4)).records
    assert (record.error, record.num_output_tokens, record.num_prompt_tokens) == (None, 4, 0)


async def test_nobody_listens_and_nobody_answers():
    target = Target("http://127.0.0.1:1")
    run = await run_load(target, [BenchRequest(prompt="p", max_tokens=1)], [0.0], model="m")
    assert run.records[0].error
    with scripted_server(first_s=60.0) as server:
        run = await run_load(Target(server.url), [BenchRequest(prompt="p", max_tokens=1)], [0.0], model="m", timeout=0.2)
    assert run.records[0].error == "no end within 0.2 s"


async def test_a_limit_of_concurrency_and_moments():
    ended = []
    with scripted_server(first_s=0.05) as server:
        run = await load(server, 12, tokens=1, max_concurrency=3, on_end=ended.append)
        assert server.most_at_once <= 3
        assert run.seconds >= 4 * 0.05
        assert len(ended) == 12
        sent = (await load(server, 3, tokens=1, moments=[0.0, 0.1, 0.3])).records
    assert sent[1].sent - sent[0].sent >= 0.09
    assert sent[2].sent - sent[0].sent >= 0.29


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
def test_what_is_no_url_is_refused(url: str):
    with pytest.raises(ConfigError, match="--base-url"):
        Target(url)


def test_a_path_in_the_url_is_kept():
    assert Target("https://x/api/v1", endpoint="/v1/completions").path == "/api/v1/completions"
    assert Target("x:80").path == "/v1/completions"
