"""Responses that are made while nobody waits for them: asked for with `background`, fetched later, cancelled at will."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError, RequestFailed
from headrace.server.answer import Answer
from headrace.server.responses.builder import ResponseBuilder
from headrace.server.responses.store import Key
from headrace.server.service import Service

logger = logging.getLogger("headrace.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    answer: Answer
    builder: ResponseBuilder
    keep: Callable[[dict[str, Any]], None]  # called with the response each time its status has changed

    async def run(self) -> None:
        response = self.builder.response
        try:
            async with aclosing(self.answer.batches()) as batches:
                async for batch in batches:
                    if response["status"] == "queued":
                        response["status"] = "in_progress"
                        self.keep(response)
                    for piece in batch:
                        self.builder.push(piece)
            self.builder.end()
        except RequestError as error:
            self.builder.fail(error)
        except Exception:
            logger.exception("a response in the background failed: a fault in the server")
            self.builder.fail(RequestFailed("The server failed to go on with this answer."))
        self.keep(response)


class BackgroundResponses:
    """The jobs that run, by tenant and id. Each holds a permit of its own, so that a drain waits for it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[Key, tuple[_Job, asyncio.Task[None]]] = {}

    def start(self, key: Key, answer: Answer, builder: ResponseBuilder, keep: Callable[[dict[str, Any]], None]) -> None:
        """Begins. Raises `QueueFull`."""
        permit = ExitStack()
        permit.enter_context(self._service.admission.permit())
        job = _Job(answer=answer, builder=builder, keep=keep)
        builder.response["status"] = "queued"
        keep(builder.response)
        task = asyncio.create_task(job.run())
        self._running[key] = (job, task)

        def ended(_: asyncio.Task[None]) -> None:
            permit.close()
            del self._running[key]

        task.add_done_callback(ended)

    async def cancel(self, key: Key) -> None:
        """Ends the job, if it still runs, and waits until all that it held is free."""
        if key not in self._running:
            return
        job, task = self._running[key]
        task.cancel()
        await asyncio.wait((task,))
        if job.builder.response["status"] in ("queued", "in_progress"):
            job.builder.response["status"] = "cancelled"
            job.keep(job.builder.response)
