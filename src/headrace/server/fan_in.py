"""The deltas of several prompts or choices as one sequence of batches: whatever is ready at a wake-up comes together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.engine.generation import ChoiceDelta

Batch = list[tuple[int, ChoiceDelta]]  # (which stream, delta)


class FanIn:
    """`async with FanIn(streams, gather=...) as batches: async for batch in batches`. Leaving it closes every stream.

    Without `gather`, which takes exactly one stream, each delta is a batch and no task is needed. The first error of any stream is raised
    once the deltas before it have been taken.
    """

    def __init__(self, streams: Sequence[AsyncIterator[ChoiceDelta]], *, gather: bool) -> None:
        assert gather or len(streams) == 1
        self._streams = streams
        self._gather = gather
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: Batch = []
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()

    async def __aenter__(self) -> Self:
        if self._gather:
            self._tasks = [asyncio.create_task(self._pump(index)) for index in range(len(self._streams))]
            for task in self._tasks:
                task.add_done_callback(lambda _: self._arrived.set())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            close: Any = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if not self._gather:
            return [(0, await anext(self._streams[0]))]
        while not self._ready:
            if self._error is not None:
                raise self._error
            if all(task.done() for task in self._tasks):
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        batch, self._ready = self._ready, []
        return batch

    async def _pump(self, index: int) -> None:
        try:
            async for delta in self._streams[index]:
                self._ready.append((index, delta))
                self._arrived.set()
        except Exception as error:
            self._error = self._error or error  # raised by __anext__
