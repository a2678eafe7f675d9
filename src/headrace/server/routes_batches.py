"""/v1/batches: the life of a batch. A key sees its own batches only."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.errors import InvalidRequest, ResourceNotFound
from headrace.jobs.records import BatchRecord
from headrace.jobs.worker import Jobs
from headrace.server.batch_service import BatchService
from headrace.server.body import decode_object, read_body
from headrace.server.routes_files import list_object, query, query_limit
from headrace.server.schema import BatchBody, validate
from headrace.server.service import Service

WINDOW_S = 24 * 3600
MAX_UNFINISHED = 100  # batches of one key
MAX_BODY_BYTES = 64 * 1024
MAX_METADATA = 16
TIMES = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at"),
    "cancelled_at",
)


def batch_object(batch: BatchRecord) -> dict[str, Any]:
    faults = [{"code": fault.code, "message": fault.message, "param": fault.param, "line": fault.line} for fault in batch.errors]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: getattr(batch, name) for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


class Batches:
    def __init__(self, service: Service, batches: BatchService) -> None:
        self._service = service
        self._batches = batches

    async def collection(self, request: Request) -> Response:
        return await (self.create(request) if request.method == "POST" else self.list(request))

    async def create(self, request: Request) -> Response:
        service, tenant = self._service, request.state.tenant
        with service.bodies.lease() as lease:
            timeout = service.config.body_timeout
            body = await read_body(request.receive, request.headers, max_bytes=MAX_BODY_BYTES, timeout=timeout, lease=lease)
        checked = validate(BatchBody, decode_object(body))
        endpoints = tuple(self._batches.answers)
        if checked.endpoint not in endpoints:
            raise InvalidRequest(f"endpoint must be one of {', '.join(endpoints)}.", param="endpoint")
        if checked.completion_window != "24h":
            raise InvalidRequest("completion_window must be 24h.", param="completion_window")
        metadata = checked.metadata
        if metadata is not None and (len(metadata) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items())):
            raise InvalidRequest(f"metadata may hold {MAX_METADATA} keys of 64 characters with values of 512.", param="metadata")
        if checked.input_file_id is None:
            raise InvalidRequest("input_file_id is required: the id of a file with purpose batch.", param="input_file_id")
        jobs = await self._batches.jobs()
        file = await jobs.run(jobs.files.get, tenant, checked.input_file_id)
        if file is None or file.purpose != "batch":
            shown = checked.input_file_id[:80]
            raise InvalidRequest(f"input_file_id: there is no file {shown!r} with purpose batch; upload one to /v1/files.", param="input_file_id")
        if await jobs.run(jobs.batches.num_unfinished, tenant) >= MAX_UNFINISHED:
            raise InvalidRequest(
                f"{MAX_UNFINISHED} batches of this key are unfinished, which is as many as may be; wait for one.", code="too_many_batches"
            )
        now = int(time.time())
        batch = BatchRecord(
            batch_id=f"batch_{uuid.uuid4().hex}",
            tenant=tenant,
            endpoint=checked.endpoint,
            input_file_id=file.file_id,
            completion_window=checked.completion_window,
            metadata=metadata,
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_S,
        )
        await jobs.run(jobs.batches.add, batch)
        self._batches.wake()
        return JSONResponse(batch_object(batch))

    async def list(self, request: Request) -> Response:
        values = query(request, ("limit", "after"))
        limit = query_limit(values, default=20, most=100)
        jobs = await self._batches.jobs()
        records, has_more = await jobs.run(jobs.batches.list, request.state.tenant, after=values.get("after"), limit=limit)
        return JSONResponse(list_object([batch_object(record) for record in records], has_more))

    async def one(self, request: Request) -> Response:
        return JSONResponse(batch_object(await self._own(request, await self._batches.jobs())))

    async def cancel(self, request: Request) -> Response:
        jobs = await self._batches.jobs()
        batch = await self._own(request, jobs)
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise InvalidRequest(f"The batch is {batch.status}; it cannot be cancelled any more.", param="batch_id", code="batch_not_cancellable")
        await jobs.run(jobs.batches.cancel, batch.batch_id)
        self._batches.wake()
        return JSONResponse(batch_object(await self._own(request, jobs)))

    async def _own(self, request: Request, jobs: Jobs) -> BatchRecord:
        batch_id = request.path_params["batch_id"]
        batch = await jobs.run(jobs.batches.get, request.state.tenant, batch_id)
        if batch is None:
            raise ResourceNotFound(
                f"There is no batch {batch_id[:80]!r}; GET /v1/batches lists those that there are.", param="batch_id", code="batch_not_found"
            )
        return batch


def routes(service: Service, batches: BatchService) -> list[Route]:
    handlers = Batches(service, batches)
    return [
        Route("/v1/batches", handlers.collection, methods=["GET", "POST"]),
        Route("/v1/batches/{batch_id}", handlers.one, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", handlers.cancel, methods=["POST"]),
    ]
