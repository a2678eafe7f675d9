from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from tests.scripts.load_script import load_script


@pytest.fixture(scope="module")
def token_load() -> ModuleType:
    return load_script("token_load")


def test_lengths_are_those_of_a_busy_service(token_load: ModuleType) -> None:
    requests = token_load.busy_requests(400, seed=1)
    prompts, answers = sorted(len(request.prompt) for request in requests), sorted(request.max_tokens for request in requests)
    assert (prompts[0], prompts[-1], answers[0], answers[-1]) == (32, 512, 16, 256)
    assert prompts[200] == pytest.approx(128, rel=0.15)
    assert answers[200] == pytest.approx(64, rel=0.15)
    assert requests == token_load.busy_requests(400, seed=1) != token_load.busy_requests(400, seed=2)


def test_so_many_run_at_a_time_and_all_run(token_load: ModuleType) -> None:
    running, most, ended = 0, 0, []

    async def run(request: object) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        ended.append(request)

    requests = token_load.busy_requests(20, seed=0)
    asyncio.run(token_load.at_a_time(6, requests, run))
    assert (most, len(ended)) == (6, 20)
    assert set(map(id, ended)) == set(map(id, requests))
