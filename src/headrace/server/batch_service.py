"""Batches in a serving process: where they are kept, when their lines run, and what answers them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from headrace.errors import EngineUnavailable, QueueFull, RequestError, RequestFailed, StartError
from headrace.jobs.database import DATABASE
from headrace.jobs.records import Line, Result
from headrace.jobs.sqlite import line_id
from headrace.jobs.worker import BatchWorker, GivenBack, Jobs
from headrace.server.service import Service
from headrace.server.streaming import encode

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_ATTEMPTS = 3  # a line with which the engine died so often is answered with that error
BUSY_SHARE = 4  # beside other requests, one part in so many of the lines in flight

AnswerBody = Callable[[bytes, str], Awaitable[bytes]]  # (body, tenant) -> JSON; raises `RequestError`

logger = logging.getLogger("headrace.server")


class BatchService:
    """Opened at the start where the folder holds batches, or else by the first request for it: a server without batches writes nothing."""

    def __init__(self, service: Service, folder: Path, *, max_lines: int) -> None:
        self.answers: dict[str, AnswerBody] = {}  # by endpoint; filled by the application
        self._service = service
        self._folder = folder
        self._max_lines = max_lines  # in flight at the same time
        self._jobs: Jobs | None = None
        self._worker: BatchWorker | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def start(self, *, must_open: bool) -> None:
        """Goes on with what is there. `must_open`: raises `StartError` where the folder cannot be used."""
        if must_open or (self._folder / DATABASE).exists():
            try:
                await self._open()
            except StartError as error:
                if must_open:
                    raise
                logger.error("%s", error)

    async def jobs(self) -> Jobs:
        """Raises `EngineUnavailable` where batches cannot be kept."""
        if self._closed:
            raise EngineUnavailable("The server is shutting down; send the request to another one.")
        try:
            return await self._open()
        except StartError as error:
            raise EngineUnavailable(f"This server cannot keep batches: {error}") from None

    async def _open(self) -> Jobs:
        async with self._opening:
            if self._jobs is None:
                self._jobs = await asyncio.to_thread(Jobs, self._folder)
                self._worker = BatchWorker(self._jobs, self.answer, self._room, max_line_bytes=self._service.config.max_body_bytes)
                self._worker.start()
            return self._jobs

    def wake(self) -> None:
        """A batch is new or has changed."""
        if self._worker is not None:
            self._worker.wake()

    async def close(self) -> None:
        """Stops at once; what is unfinished goes on at the next start."""
        self._closed = True
        async with self._opening:
            worker, self._worker = self._worker, None
            jobs, self._jobs = self._jobs, None
        if worker is not None:
            await worker.close()
        if jobs is not None:
            await jobs.close()

    def _room(self) -> int:
        """The engine puts lines behind all else anyway; fewer of them beside others leave those more memory."""
        service = self._service
        if service.state != "ready":
            return 0
        return self._max_lines if not service.admission.active else max(1, self._max_lines // BUSY_SHARE)

    async def answer(self, line: Line) -> Result | GivenBack:
        try:
            status, body = 200, await self.answers[line.endpoint](line.body, line.tenant)
        except EngineUnavailable as error:
            if self._closed or self._service.draining or line.attempts + 1 < MAX_ATTEMPTS:
                return GivenBack(engine_died=not (self._closed or self._service.draining))
            status, body = error.status, encode(error.body())
        except RequestError as error:
            if isinstance(error, QueueFull) and error.code == QueueFull.code:
                return GivenBack()
            status, body = error.status, encode(error.body())
        except Exception:
            logger.exception("line %d of batch %s failed: a fault in the server", line.number, line.batch_id)
            failed = RequestFailed("The server failed to answer this request; its log says why.")
            status, body = failed.status, encode(failed.body())
        self._service.metrics.batch_line(ok=status == 200)
        response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": msgspec.Raw(body)}
        text = encode({"id": line_id(line.batch_id, line.number), "custom_id": line.custom_id, "response": response, "error": None})
        return Result(ok=status == 200, text=text)
