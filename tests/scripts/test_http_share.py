"""The arithmetic of the measurement: which pairs count, and how sure their median is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest

from tests.scripts.load_script import load_script


@pytest.fixture(scope="module")
def http_share() -> ModuleType:
    return load_script("http_share")


@pytest.fixture
def pair(http_share: ModuleType) -> Callable[..., Any]:
    def pair(share: float, others: float = 0.0) -> Any:
        offline, served = (
            http_share.Turn(tokens_per_second=rate, others=others, http_us=1.0, engine_us=2.0, own_us=3.0) for rate in (100.0, 100.0 * share)
        )
        return http_share.Pair(offline=offline, served=served)

    return pair


def test_the_interval_of_a_median(http_share: ModuleType) -> None:
    assert http_share.median_interval([1, 2, 3, 4, 5]) is None  # all five above or below: 1 in 16
    assert http_share.median_interval([6, 5, 4, 3, 2, 1]) == (1, 6)
    assert http_share.median_interval(list(range(20))) == (5, 14)  # the table of the sign test: 5 of 20


def test_disturbed_pairs_do_not_count(http_share: ModuleType, pair: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[int, bool]] = []
    others = [0.5, 0.0, 0.0, 0.5, 0.0]

    async def one(seed: int, offline_first: bool) -> Any:
        asked.append((seed, offline_first))
        return pair(0.9 + seed / 100, others[seed])

    pairs = asyncio.run(http_share.calm_pairs(3, 0.1, one))
    assert [found.share for found in pairs] == pytest.approx([0.91, 0.92, 0.94])
    assert asked == [(0, True), (1, True), (2, False), (3, True), (4, True)]  # new prompts each time, the order changes with what counts
    assert capsys.readouterr().out.count("does not count") == 2
    assert http_share.result(pairs) == "over HTTP / offline, median of 3 pairs: 92.0%"


def test_a_machine_that_is_never_calm_ends_it(http_share: ModuleType, pair: Callable[..., Any]) -> None:
    async def one(seed: int, offline_first: bool) -> Any:
        return pair(1.0, 0.5)

    assert asyncio.run(http_share.calm_pairs(2, 0.1, one)) == []


def test_both_get_the_same_requests_in_the_order_asked_for(http_share: ModuleType) -> None:
    seen: list[tuple[str, int]] = []

    class Watch:
        def __init__(self) -> None:
            self.clock = 0.0

        def times(self) -> Any:
            self.clock += 1.0
            return http_share.Times(at=self.clock, machine=self.clock, http=0.25 * self.clock, engines=0.5 * self.clock, own=0.25 * self.clock)

    def run(name: str) -> Callable[[Any], Awaitable[None]]:
        async def run(request: Any) -> None:
            seen.append((name, request.max_tokens))

        return run

    requests = http_share.busy_requests(3, seed=0)
    found = asyncio.run(http_share.pair(Watch(), requests, 1, run("offline"), run("served"), offline_first=False))
    lengths = [request.max_tokens for request in requests]
    assert seen == [("served", tokens) for tokens in lengths] + [("offline", tokens) for tokens in lengths]
    assert found.offline.tokens_per_second == found.served.tokens_per_second == sum(lengths)
    assert found.others == 0.0  # the machine did what the three did
    assert found.served.http_us == pytest.approx(0.25e6 / sum(lengths))
