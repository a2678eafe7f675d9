"""Runs the batches of one store on one event loop: a bounded number of lines at a time, and what comes before and after them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.jobs.database import Database
from headrace.jobs.files import FileStore
from headrace.jobs.input_file import InputFile
from headrace.jobs.records import BatchRecord, EndStatus, Fault, Line, Result
from headrace.jobs.sqlite import SqliteStore

TICK_S = 0.25  # how often a batch that waits for room, or for its window to end, is looked at
PAUSE_S = 1.0  # after lines were given back
VALIDATION_REST = 2  # after each part of an input file a rest of so many times what it took: running answers want the processor more
T = TypeVar("T")
logger = logging.getLogger("headrace.jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack:
    """A line that could not be answered now and can be later."""

    engine_died: bool = False  # while the line was computed, and perhaps because of it


Answer = Callable[[Line], Awaitable[Result | GivenBack]]  # raises only when it is cancelled


class Jobs:
    """The stores of a folder for an event loop: calls run one after another in a thread of their own. Raises `StartError`."""

    def __init__(self, folder: Path) -> None:
        database = Database(folder)
        self.files = FileStore(database)
        self.batches = SqliteStore(database)
        self._database = database
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-jobs")

    async def run(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """The call's result, a method of `files` or `batches`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*arguments, **options))

    async def close(self) -> None:
        await self.run(self._database.close)
        self._thread.shutdown()


class BatchWorker:
    """Works from `start` to `close`; `wake` tells it that a batch is new or has changed.

    `room` says how many lines may be in flight right now. Whatever `close` leaves unfinished is there at the next start.
    """

    def __init__(self, jobs: Jobs, answer: Answer, room: Callable[[], int], *, max_line_bytes: int) -> None:
        self._jobs = jobs
        self._answer = answer
        self._room = room
        self._max_line_bytes = max_line_bytes
        self._changed = asyncio.Event()
        self._running: dict[asyncio.Task[None], str] = {}  # lines in flight -> batch
        self._settling: dict[str, asyncio.Task[None]] = {}  # batches that are validated, or written and ended
        self._pause_until = 0.0  # monotonic seconds
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._main = asyncio.create_task(self._work(), name="batches")

    def wake(self) -> None:
        self._changed.set()

    async def close(self) -> None:
        tasks = [*self._running, *self._settling.values(), *([self._main] if self._main else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            try:
                unfinished = await self._jobs.run(self._jobs.batches.unfinished)
                for batch in unfinished:
                    self._settle(batch)
                if any(batch.status == "in_progress" for batch in unfinished):
                    await self._fill()
            except Exception:  # the disk is full, say: what is written is whole, and it may go on later
                logger.exception("batches cannot go on; trying again")
                unfinished = None
                await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(TICK_S if unfinished is None or unfinished else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _settle(self, batch: BatchRecord) -> None:
        """Begin what the batch needs beside its lines, unless that runs already."""
        if batch.batch_id in self._settling:
            return
        work: Callable[[BatchRecord], Awaitable[None]] | None = None
        if batch.status == "cancelling":
            work = self._ended("cancelled")
        elif batch.status == "finalizing":
            work = self._ended("completed" if batch.completed + batch.failed == batch.total else "expired")
        elif batch.status == "in_progress" and time.time() >= batch.expires_at:
            work = self._expire
        elif batch.status == "validating" and not any(self._settling):
            work = self._validate
        if work is not None:
            task = asyncio.ensure_future(self._guarded(work(batch)))
            self._settling[batch.batch_id] = task
            task.add_done_callback(lambda _: (self._settling.pop(batch.batch_id), self.wake()))

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("a batch cannot go on; trying again")
            await asyncio.sleep(PAUSE_S)

    async def _expire(self, batch: BatchRecord) -> None:
        await self._jobs.run(self._jobs.batches.stop, batch.batch_id)

    async def _validate(self, batch: BatchRecord) -> None:
        """Reads the input file and brings its lines into the store."""
        jobs = self._jobs
        await jobs.run(jobs.batches.forget_lines, batch.batch_id)  # of a validation that was killed
        path = jobs.files.path(batch.input_file_id)
        file = InputFile(path, endpoint=batch.endpoint, max_line_bytes=self._max_line_bytes)
        chunks = file.chunks()
        try:
            begin = time.monotonic()
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                await jobs.run(jobs.batches.put, batch.batch_id, chunk)
                await asyncio.sleep(VALIDATION_REST * (time.monotonic() - begin))
                begin = time.monotonic()
        except FileNotFoundError:
            file.faults.append(Fault(code="file_not_found", message="The input file was removed.", param="input_file_id"))
        if file.faults:
            await jobs.run(jobs.batches.fail, batch.batch_id, file.faults)
        else:
            await jobs.run(jobs.batches.begin, batch.batch_id, file.num_lines)

    def _ended(self, status: EndStatus) -> Callable[[BatchRecord], Awaitable[None]]:
        async def end(batch: BatchRecord) -> None:
            jobs = self._jobs
            running = [task for task, batch_id in self._running.items() if batch_id == batch.batch_id]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await jobs.run(time.time)  # results that were on their way are written now, or never
            files = await asyncio.to_thread(jobs.batches.write_results, batch, status)
            await jobs.run(jobs.batches.end, batch, status, files)
            logger.info("batch %s is %s", batch.batch_id, status)

        return end

    async def _fill(self) -> None:
        """Start as many lines as there is room for."""
        limit = self._room() - len(self._running)
        if limit < 1 or time.monotonic() < self._pause_until:
            return
        for line in await self._jobs.run(self._jobs.batches.take, limit):
            task = asyncio.create_task(self._run_line(line))
            self._running[task] = line.batch_id
            task.add_done_callback(self._line_done)

    def _line_done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self.wake()

    async def _run_line(self, line: Line) -> None:
        outcome = await self._answer(line)
        jobs = self._jobs
        if isinstance(outcome, GivenBack):
            self._pause_until = time.monotonic() + PAUSE_S
            await jobs.run(jobs.batches.finish, line, None, engine_died=outcome.engine_died)
        else:
            await jobs.run(jobs.batches.finish, line, outcome)
