"""What keys may use in a minute, and how their clients are told."""

import logging
from functools import partial
from typing import Any

import pytest

from headrace.config import ApiKey
from headrace.errors import RateLimitExceeded
from headrace.server import auth as auth_module
from headrace.server.rate_limits import KeyLimits, duration
from tests.server.fakes import World, refused

SLOW = ApiKey(name="slow", key="sk-slow", requests_per_minute=2)
SMALL = ApiKey(name="small", key="sk-small", tokens_per_minute=100, priority=3)
FREE = ApiKey(name="free", key="sk-free")
keyed = pytest.mark.parametrize("world", [{"limited_keys": (SLOW, SMALL, FREE), "log_requests": True}], indirect=True)
FIELDS = ("limit", "remaining", "reset")


def auth(key: ApiKey) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.key}"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def no_time_passes_in_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_module, "KeyLimits", partial(KeyLimits, clock=Clock()))


def test_requests_come_back_with_time():
    clock = Clock()
    limits = KeyLimits(ApiKey(name="a", key="k", requests_per_minute=6), clock=clock)
    for _ in range(6):
        limits.take_request()
    assert limits.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    with pytest.raises(RateLimitExceeded) as refusal:
        limits.take_request()
    assert refusal.value.retry_after == 10
    clock.now = 9.9
    with pytest.raises(RateLimitExceeded):
        limits.take_request()
    clock.now = 10.0
    limits.take_request()
    clock.now = 1000.0
    assert limits.headers()["x-ratelimit-remaining-requests"] == "6"  # no more than a minute's is saved up


def test_tokens_are_settled_and_an_answer_that_was_longer_is_owed():
    clock = Clock()
    limits = KeyLimits(ApiKey(name="a", key="k", tokens_per_minute=600), clock=clock)

    def remaining() -> int:
        return int(limits.headers()["x-ratelimit-remaining-tokens"])

    charge = limits.charge(prompt_tokens=100, answer_tokens=300)
    assert remaining() == 200
    charge.settle(150)
    charge.settle(0)
    assert remaining() == 450
    limits.charge(prompt_tokens=50, answer_tokens=0).settle(950)
    assert remaining() == 0
    with pytest.raises(RateLimitExceeded) as refusal:
        limits.charge(prompt_tokens=100, answer_tokens=0)
    assert refusal.value.retry_after == 60  # 500 owed and 100 asked for, ten a second
    clock.now = 60.0
    limits.charge(prompt_tokens=100, answer_tokens=0)


def test_more_than_a_whole_minute_is_let_in_when_all_of_it_is_there():
    clock = Clock()
    limits = KeyLimits(ApiKey(name="a", key="k", tokens_per_minute=60), clock=clock)
    limits.charge(prompt_tokens=90, answer_tokens=0)
    with pytest.raises(RateLimitExceeded) as refusal:
        limits.charge(prompt_tokens=1, answer_tokens=0)
    assert refusal.value.retry_after == 31


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (0.9999, "1s"), (1, "1s"), (59.2, "1m0s"), (60, "1m0s"), (399.5, "6m40s")]
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


@keyed
async def test_requests_over_the_limit_are_told_when_to_come_back(world: World):
    body = {"prompt": "x", "max_tokens": 1}
    for left in ("1", "0"):
        response = await world.post("/v1/completions", body, headers=auth(SLOW))
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == left
        assert not any(f"x-ratelimit-{field}-tokens" in response.headers for field in FIELDS)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"):
        response = await world.post(path, body, headers=auth(SLOW))
        refused(response, 429, code="rate_limit_exceeded")
        assert response.headers["retry-after"] == "30"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
    response = await world.post("/v1/messages", {}, headers=auth(SLOW))
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert (await world.http.get("/v1/models", headers=auth(SLOW))).status_code == 200  # nothing is computed for it
    for key in (FREE, SMALL):
        response = await world.post("/v1/completions", body, headers=auth(key))
        assert response.status_code == 200
        assert "x-ratelimit-limit-requests" not in response.headers
    assert len(world.generator.requests) == 4


@keyed
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_estimated_and_then_settled(world: World, stream: bool):
    async def ask(**body: Any) -> Any:
        return await world.post("/v1/completions", {"prompt": "abcde", "stream": stream, **body}, headers=auth(SMALL))

    world.generator.answer, world.generator.stops = "ok", True
    response = await ask(max_tokens=95)
    assert response.headers["x-ratelimit-limit-tokens"] == "100"
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == (0 if stream else 93)  # a stream's headers go out at its start
    assert (await world.http.get("/v1/models", headers=auth(SMALL))).headers["x-ratelimit-remaining-tokens"] == "93"
    world.generator.error, world.generator.error_after = RuntimeError("before the first token"), 0
    assert (await ask(max_tokens=80)).status_code == 500
    world.generator.error = None
    world.generator.stops = False
    assert (await ask(max_tokens=60)).status_code == 200
    refused(await ask(max_tokens=60), 429, code="rate_limit_exceeded")
    refused(await world.post("/v1/embeddings", {"input": "x" * 90}, headers=auth(SMALL)), 429, code="rate_limit_exceeded")


@keyed
async def test_priority_is_no_more_urgent_than_the_key_may(world: World):
    for key, asked in ((SMALL, -5), (SMALL, 7), (FREE, -5)):
        await world.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "priority": asked}, headers=auth(key))
    await world.post("/v1/embeddings", {"input": "x", "priority": -5}, headers=auth(SMALL))
    assert [request.priority for request in world.generator.requests] == [3, 7, -5]
    assert [request.priority for request in world.generator.embedding_requests] == [3]


@keyed
async def test_the_log_has_the_name_of_a_key_and_nothing_has_the_key(world: World, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        await world.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=auth(SLOW))
        await world.post("/v1/completions", {"prompt": ""}, headers={"x-api-key": "sk-slowx"})
    assert "key=slow" in caplog.text
    metrics = (await world.http.get("/metrics", headers=auth(FREE))).text
    for text in (caplog.text, metrics, repr(world.service.config)):
        assert "sk-" not in text
