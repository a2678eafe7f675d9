"""One request of a client, from its bytes to its responses, as HTTP's routes do it: within the budget for bodies, with a permit, off the event
loop where it is large."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError
from headrace.server.answer import Answer, Piece
from headrace.server.body import BodyLease
from headrace.server.generation_route import charge_for
from headrace.server.open_inference import status, wire
from headrace.server.open_inference.parse import InferRequest, decode, parse
from headrace.server.open_inference.response import OUTPUTS, delta_response, final_response, whole_response
from headrace.server.rate_limits import Charge, KeyLimits
from headrace.server.request_span import RequestSpan
from headrace.server.service import Service

logger = logging.getLogger("headrace.access")


@dataclass(slots=True, kw_only=True)
class Call:
    data: bytes  # the message; empty once it has been read
    stream: bool  # several responses may follow, each a `ModelStreamInferResponse`; else one `ModelInferResponse`
    tenant: str
    limits: KeyLimits
    arrival: float  # monotonic seconds
    seconds_left: float | None  # from the arrival to the client's deadline
    write: Callable[[Any], Awaitable[None]]  # sends a response
    span: RequestSpan | None = None  # where it is traced
    id: str = ""  # the client's, once it is known

    async def run(self, service: Service) -> None:
        """Answers it. Raises `RequestError`; cancelling it gives everything back."""
        if self.span is None:
            await self._run(service)
            return
        code = error = "CANCELLED"
        try:
            await self._run(service)
            code, error = "OK", ""
        except RequestError as failure:
            code = status.code_of(failure).name
            error = code if failure.status >= 500 else ""
            raise
        finally:
            self.span.ended({"rpc.system": "grpc", "rpc.service": wire.SERVICE, "rpc.grpc.status": code}, error=error or None)

    async def _run(self, service: Service) -> None:
        service.model()
        self.limits.take_request()
        with service.bodies.lease() as lease, service.admission.permit():
            lease.charge(len(self.data))
            with nullcontext() if self.span is None else self.span.part("tokenize"):
                request = await self._parse(service, lease)
            charge = charge_for(request.parsed, self.limits)
            try:
                await self._generate(service, request, charge)
            except BaseException:
                charge.settle(0)  # where the answer has not begun and settled it
                raise

    async def _generate(self, service: Service, request: InferRequest, charge: Charge) -> None:
        model = service.model()  # the process may have begun to drain in the meantime
        answer = Answer(
            dataclasses.replace(request.parsed, priority=self.limits.priority(request.parsed.priority)),
            model,
            service.metrics,
            answer_id=f"infer-{uuid.uuid4().hex}",
            tenant=self.tenant,
            arrival=self.arrival,
            new_scorer=request.new_scorers(request.parsed, model),
            charge=charge,
            watcher=self.span,
        )
        if self.span is not None:
            self.span.asks(request.parsed)
        outcome = "CANCELLED"
        try:
            await self._answer(request, answer)
            outcome = "OK"
        except RequestError as error:
            outcome = status.code_of(error).name
            raise
        finally:
            if self.span is not None:
                self.span.answered(answer)
            if service.config.log_requests:
                usage, seconds = answer.usage, time.monotonic() - self.arrival
                tokens = f"prompt_tokens={usage.prompt_tokens} completion_tokens={usage.completion_tokens}"
                logger.info("gRPC %s %s %.3fs id=%s %s", wire.SERVICE, outcome, seconds, ascii(self.id[:128]), tokens)

    async def _parse(self, service: Service, lease: BodyLease) -> InferRequest:
        size, data = len(self.data), self.data
        self.data = b""  # a large one is not kept while the answer is made
        message = await service.offload(size, decode, wire.ModelInferRequest, data)
        self.id = message.id

        def checked() -> InferRequest:
            return parse(message, service, service.model(), OUTPUTS, stream=self.stream, seconds_left=self.seconds_left)

        request = await service.offload(size, checked)
        lease.release()
        return request

    async def _answer(self, request: InferRequest, answer: Answer) -> None:
        unfinished = len(request.parsed.prompts) * request.parsed.n
        pieces: list[Piece] = []
        async with aclosing(answer.batches()) as batches:
            async for batch in batches:
                if not request.parsed.stream:
                    pieces += batch
                    continue
                for piece in batch:
                    unfinished -= piece.finish_reason is not None
                    await self.write(delta_response(request, piece, answer.usage, final=unfinished == 0))
        if not request.parsed.stream:
            whole = whole_response(request, pieces, answer.usage)
            await self.write(final_response(whole) if self.stream else whole)
