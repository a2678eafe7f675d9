"""What all generating routes do: admit, read, parse, answer, and stop at once when the client hangs up."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, Generic, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from headrace.errors import InvalidRequest
from headrace.observe.metrics import BackgroundMetrics, RequestMetrics
from headrace.server.answer import Answer, Header, Scorer, Usage
from headrace.server.body import BodyLease, ClientGone, read_body
from headrace.server.parse import ParsedRequest, Prompt
from headrace.server.rate_limits import Charge, KeyLimits
from headrace.server.request_span import RequestSpan
from headrace.server.request_timeout import earlier, timeout_ms
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import Wire, encode, send_body, send_stream, whole_body

Result = TypeVar("Result")
Request = TypeVar("Request", bound=ParsedRequest)


class Dialect(Protocol[Request]):
    """What is a route's own: how its bodies are read, and how its answers are written."""

    id_prefix: str

    def parse(self, body: bytes, service: Service, model: LoadedModel, tenant: str) -> Request:
        """The request in a body. Called in any thread; raises `RequestError`."""

    def new_scorers(self, request: Request, model: LoadedModel) -> Callable[[Prompt], Scorer] | None:
        """How logprobs are written; None where none were asked for."""

    def new_wire(self, request: Request, header: Header, usage: Usage) -> Wire:
        """The writer of one answer; `usage` grows with it."""


class GenerationRoute(Generic[Request]):
    """An ASGI application for one route."""

    def __init__(self, service: Service, dialect: Dialect[Request]) -> None:
        self.service = service
        self.dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = time.monotonic()
        service = self.service
        service.model()  # refuses at once where nothing can be served
        scope["state"]["limits"].take_request()
        config = service.config
        with service.bodies.lease() as lease:
            body = await read_body(receive, Headers(scope=scope), max_bytes=config.max_body_bytes, timeout=config.body_timeout, lease=lease)
            with service.admission.permit():
                work = self._serve(body, lease, scope, send, arrival)
                del body  # a large one is not kept while the answer is made
                await until_disconnect(receive, work)

    async def _serve(self, body: bytes, lease: BodyLease, scope: Scope, send: Send, arrival: float) -> None:
        service, dialect = self.service, self.dialect
        model = service.model()  # the process may have begun to drain while the body came in
        tenant = scope["state"]["tenant"]
        span: RequestSpan | None = scope["state"].get("span")
        with nullcontext() if span is None else span.part("tokenize"):
            request = await service.offload(len(body), dialect.parse, body, service, model, tenant)
        del body
        lease.release()
        deadline_ms = earlier(request.deadline_ms, timeout_ms(scope))
        limits: KeyLimits = scope["state"]["limits"]
        charge = charge_for(request, limits)
        priority = limits.priority(request.priority)
        if (priority, deadline_ms) != (request.priority, request.deadline_ms):
            request = dataclasses.replace(request, priority=priority, deadline_ms=deadline_ms)
        try:
            answer, wire = self._open(request, model, service.metrics, tenant=tenant, arrival=arrival, background=False, charge=charge, span=span)
            scope["state"]["usage"] = answer.usage
            rest: Send = scope["state"].get("send", send)
            if span is not None:
                span.asks(request)
                send, rest = span.counting(send), span.counting(rest)
            try:
                await self.respond(request, answer, wire, send, rest)
            finally:
                if span is not None:
                    span.answered(answer)
        except BaseException:
            charge.settle(0)  # where the answer has not begun and settled it
            raise

    def _open(
        self,
        request: Request,
        model: LoadedModel,
        metrics: RequestMetrics,
        *,
        tenant: str,
        arrival: float,
        background: bool,
        charge: Charge | None = None,
        span: RequestSpan | None = None,
    ) -> tuple[Answer, Wire]:
        dialect = self.dialect
        header = Header(answer_id=dialect.id_prefix + uuid.uuid4().hex, created=int(time.time()), model=request.model)
        answer = Answer(
            request,
            model,
            metrics,
            answer_id=header.answer_id,
            tenant=tenant,
            arrival=arrival,
            new_scorer=dialect.new_scorers(request, model),
            background=background,
            charge=charge,
            watcher=span,
        )
        return answer, dialect.new_wire(request, header, answer.usage)

    async def in_background(self, body: bytes, tenant: str) -> bytes:
        """The whole answer to a body, as JSON, computed when there is time. Raises `RequestError`."""
        service = self.service
        model = service.model()
        request = await service.offload(len(body), self.dialect.parse, body, service, model, tenant)
        if request.stream:
            raise InvalidRequest("stream must be false in a batch: its answers are written whole.", param="stream")
        metrics = BackgroundMetrics(service.metrics)
        answer, wire = self._open(request, model, metrics, tenant=background_tenant(tenant), arrival=time.monotonic(), background=True)
        return encode(await whole_body(answer, wire))

    async def respond(self, request: Request, answer: Answer, wire: Wire, send: Send, rest: Send) -> None:
        """`rest`: the server's own `send`, for what follows the start of a stream: at each token it spares the layers between."""
        if request.stream:
            await send_stream(send, answer, wire, rest)
        else:
            await send_body(send, answer, wire)


def charge_for(request: ParsedRequest, limits: KeyLimits) -> Charge:
    """Charges a key with what a request may use. Raises `RateLimitExceeded`."""
    return limits.charge(
        prompt_tokens=sum(len(prompt.token_ids) for prompt in request.prompts),
        answer_tokens=max(prompt.params.max_tokens or 0 for prompt in request.prompts),
        num_choices=len(request.prompts) * request.n,
    )


def background_tenant(tenant: str) -> str:
    """To whom background work is accounted: what it takes is nobody else's, so it does not count against the tenant's other requests."""
    return f"{tenant} background"


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
