"""The small server's HTTP side in front of a scripted worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.bench.rungs.batch import Job
from headrace.bench.rungs.web import create_app
from headrace.observe.work import Work
from headrace.text.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import byte_tokenizer


class Echo:
    """Answers with the prompt, backwards; a prompt of X fails."""

    work = Work()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bad = tokenizer.encode("X")

    def submit(self, job: Job) -> None:
        if list(job.prompt) == self.bad:
            job.on_end(RuntimeError("no memory"))
            return
        for token in list(job.prompt)[::-1][: job.max_tokens]:
            job.on_token(token)
        job.on_end(None)


@pytest.fixture
def client(tmp_path: Path) -> httpx.AsyncClient:
    tokenizer = byte_tokenizer(tmp_path)
    app = create_app(Echo(tokenizer), tokenizer, model_name="tiny", max_length=40)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rung")


ASKED: dict[str, Any] = {"model": "tiny", "prompt": "a b", "max_tokens": 8, "stream": True, "temperature": 0.0, "ignore_eos": True}


async def test_an_answer_is_a_stream_with_its_usage(client: httpx.AsyncClient):
    response = await client.post("/v1/completions", json=ASKED | {"stream_options": {"include_usage": True}})
    assert response.status_code == 200
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    values = [json.loads(event) for event in events]
    assert "".join(choice["text"] for value in values for choice in value["choices"]) == "b a"
    assert values[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


async def test_a_failure_is_told_in_the_stream(client: httpx.AsyncClient):
    response = await client.post("/v1/completions", json=ASKED | {"prompt": "X"})
    assert json.loads(response.text.removeprefix("data: "))["error"]["message"] == "RuntimeError: no memory"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.7}, "temperature 0"),
        ({"stream": False}, "stream true"),
        ({"top_p": 0.9}, "top_p is not known"),
        ({"prompt": ""}, "prompt must be a text"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 40}, "beyond the model's 40"),
    ],
)
async def test_what_it_does_not_do_is_refused(client: httpx.AsyncClient, change: dict[str, Any], words: str):
    response = await client.post("/v1/completions", json=ASKED | change)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_it_says_where_its_time_went_and_what_it_serves(client: httpx.AsyncClient):
    assert 'headrace_work_seconds_total{kind="padding"} 0.0' in (await client.get("/metrics")).text
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
    assert (await client.get("/ready")).status_code == 200
