import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.engine.generation import ChoiceDelta
from headrace.server.fan_in import FanIn


class Stream:
    """Yields deltas with texts 0, 1, ...; `fail` raises after them; `wait` never ends."""

    def __init__(self, count: int, *, fail: bool = False, wait: bool = False) -> None:
        self.count, self.fail, self.wait = count, fail, wait
        self.closed = False

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        try:
            for number in range(self.count):
                yield ChoiceDelta(index=0, text=str(number))
            if self.fail:
                raise ValueError("broken")
            if self.wait:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def test_what_is_ready_comes_in_one_batch():
    streams = [Stream(3), Stream(2)]
    async with FanIn([stream.deltas() for stream in streams], gather=True) as batches:
        taken = [[(index, delta.text) for index, delta in batch] async for batch in batches]
    assert taken == [[(0, "0"), (0, "1"), (0, "2"), (1, "0"), (1, "1")]]


async def test_a_single_stream_needs_no_task():
    stream = Stream(2)
    async with FanIn([stream.deltas()], gather=False) as batches:
        before = len(asyncio.all_tasks())
        assert [batch[0][1].text async for batch in batches] == ["0", "1"]
        assert len(asyncio.all_tasks()) == before
    assert stream.closed


@pytest.mark.parametrize("gather", [False, True])
async def test_an_error_comes_after_the_deltas_before_it_and_closes_all(gather: bool):
    streams = [Stream(2, fail=True), *([Stream(1, wait=True)] if gather else [])]
    seen: list[tuple[int, str]] = []

    async def take_all() -> None:
        async with FanIn([stream.deltas() for stream in streams], gather=gather) as batches:
            async for batch in batches:
                seen.extend((index, delta.text) for index, delta in batch)

    with pytest.raises(ValueError, match="broken"):
        await take_all()
    assert [item for item in seen if item[0] == 0] == [(0, "0"), (0, "1")]
    assert all(stream.closed for stream in streams)


@pytest.mark.parametrize("gather", [False, True])
async def test_leaving_early_closes_all(gather: bool):
    streams = [Stream(3, wait=True), *([Stream(0, wait=True)] if gather else [])]
    async with FanIn([stream.deltas() for stream in streams], gather=gather) as batches:
        await anext(batches)
    assert all(stream.closed for stream in streams)
