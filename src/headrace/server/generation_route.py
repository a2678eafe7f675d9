"""What all generating routes do: admit, read, parse, answer, and stop at once when the client hangs up."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from headrace.server.answer import Answer, Scorer
from headrace.server.body import BodyLease, ClientGone, read_body
from headrace.server.parse import ParsedRequest, Prompt
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import Form, Header, send_body, send_stream

Result = TypeVar("Result")
Parse = Callable[[bytes, Service, LoadedModel], ParsedRequest]  # thread-safe
NewScorers = Callable[[ParsedRequest, LoadedModel], Callable[[Prompt], Scorer] | None]


class GenerationRoute:
    """An ASGI application for one route."""

    def __init__(self, service: Service, *, parse: Parse, form: Callable[[ParsedRequest], Form], new_scorers: NewScorers) -> None:
        self._service = service
        self._parse = parse
        self._form = form
        self._new_scorers = new_scorers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = time.monotonic()
        service = self._service
        service.model()  # refuses at once where nothing can be served
        config = service.config
        with service.bodies.lease() as lease:
            body = await read_body(receive, Headers(scope=scope), max_bytes=config.max_body_bytes, timeout=config.body_timeout, lease=lease)
            with service.admission.permit():
                work = self._serve(body, lease, scope, send, arrival)
                del body  # a large one is not kept while the answer is made
                await until_disconnect(receive, work)

    async def _serve(self, body: bytes, lease: BodyLease, scope: Scope, send: Send, arrival: float) -> None:
        model = self._service.model()  # the process may have begun to drain while the body came in
        request = await self._service.offload(len(body), self._parse, body, self._service, model)
        del body
        lease.release()
        await self._answer(request, model, scope, send, arrival)

    async def _answer(self, request: ParsedRequest, model: LoadedModel, scope: Scope, send: Send, arrival: float) -> None:
        form = self._form(request)
        header = Header(answer_id=form.id_prefix + uuid.uuid4().hex, created=int(time.time()), model=request.model)
        answer = Answer(
            request,
            model,
            self._service.metrics,
            answer_id=header.answer_id,
            tenant=scope["state"]["tenant"],
            arrival=arrival,
            new_scorer=self._new_scorers(request, model),
        )
        scope["state"]["usage"] = answer.usage
        if request.stream:
            await send_stream(send, answer, form, header, request)
        else:
            await send_body(send, answer, form, header)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work, which is cancelled when the client hangs up: then `ClientGone` is raised."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
