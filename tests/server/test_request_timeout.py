import time

import pytest

from tests.server.fakes import World, refused


@pytest.mark.parametrize(("value", "given", "milliseconds"), [("2.5", None, 2500), ("2.5", 1000, 1000), ("1", 9000, 1000), ("0.0001", None, 1)])
async def test_the_earlier_of_header_and_field_counts(world: World, value: str, given: int | None, milliseconds: int):
    headers, begin = {"X-Request-Timeout": value}, time.monotonic()
    for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/v1/embeddings", {"input": "x"})):
        assert (await world.post(path, {**body, "deadline_ms": given}, headers=headers)).status_code == 200
    end = time.monotonic()
    assert (await world.complete(prompt="x", max_tokens=1)).status_code == 200
    (one, two), (vector,) = world.generator.requests, world.generator.embedding_requests
    assert two.deadline is None
    for request in (one, vector):
        assert request.deadline is not None
        assert begin + milliseconds / 1000 <= request.deadline <= end + milliseconds / 1000


@pytest.mark.parametrize("value", ["", "0", "-1", "abc", "1e3", "inf", "12345678", "1s"])
async def test_what_is_no_number_of_seconds_is_refused(world: World, value: str):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
        refused(await world.post(path, body, headers={"X-Request-Timeout": value}), 400, param="X-Request-Timeout")
