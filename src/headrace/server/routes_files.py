"""/v1/files: what batches are made from, and what they give. A key sees its own files only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.errors import InvalidRequest, QueueFull, ResourceNotFound
from headrace.jobs.records import FileRecord
from headrace.jobs.worker import Jobs
from headrace.server.batch_service import BatchService
from headrace.server.service import Service
from headrace.server.upload import receive_upload

UPLOADS_AT_ONCE = 8
STORED_FILES = 32  # a key's files together: so many of the largest size
PIECE_BYTES = 256 * 1024


def file_object(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.size,
        "created_at": record.created_at,
        "expires_at": None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_object(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, **ends, "has_more": has_more}


def query(request: Request, allowed: tuple[str, ...]) -> dict[str, str]:
    """The query's values; raises `InvalidRequest` for a name that is not known here or stands twice."""
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in allowed or name in values:
            raise InvalidRequest(f"The query may hold {', '.join(allowed)}, each once; it has {name[:80]!r}.", param=name[:80])
        values[name] = value
    return values


def query_limit(values: dict[str, str], *, default: int, most: int) -> int:
    text = values.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise InvalidRequest(f"limit must be a whole number from 1 to {most}, not {text[:40]!r}.", param="limit")
    return int(text)


async def own_file(jobs: Jobs, tenant: str, file_id: str) -> FileRecord:
    record = await jobs.run(jobs.files.get, tenant, file_id)
    if record is None:
        raise no_file(file_id)
    return record


def no_file(file_id: str) -> ResourceNotFound:
    return ResourceNotFound(f"There is no file {file_id[:80]!r}; GET /v1/files lists those that there are.", param="file_id", code="file_not_found")


async def pieces_of(stream: BinaryIO) -> AsyncIterator[bytes]:
    with stream:
        while piece := await asyncio.to_thread(stream.read, PIECE_BYTES):
            yield piece


class Files:
    def __init__(self, service: Service, batches: BatchService) -> None:
        self._service = service
        self._batches = batches
        self._uploads = 0

    async def collection(self, request: Request) -> Response:
        return await (self.create(request) if request.method == "POST" else self.list(request))

    async def create(self, request: Request) -> Response:
        if self._uploads >= UPLOADS_AT_ONCE:
            raise QueueFull(f"{self._uploads} files are being sent, which is as many as the server takes at once; try again in a moment.")
        self._uploads += 1
        try:
            return await self._create(request)
        finally:
            self._uploads -= 1

    async def _create(self, request: Request) -> Response:
        config = self._service.config
        tenant = request.state.tenant
        jobs = await self._batches.jobs()
        room = STORED_FILES * config.max_file_bytes - await jobs.run(jobs.files.stored_bytes, tenant)
        part = jobs.files.part()
        try:
            limits = {"max_bytes": config.max_file_bytes, "timeout": config.body_timeout}
            upload = await receive_upload(request.receive, request.headers, part, **limits)  # type: ignore[arg-type]
            if upload.size > room:
                raise InvalidRequest("The files of this key take as much room as they may; delete some first.", param="file", code="storage_full")
            purpose = upload.fields.pop("purpose", None)
            if purpose != "batch":
                raise InvalidRequest("purpose must be batch: this server keeps files for batches only.", param="purpose")
            for name in upload.fields:
                raise InvalidRequest(
                    f"Unknown field {name[:80]!r}; a form holds file and purpose. Files stay until they are deleted.", param=name[:80]
                )
            record = await jobs.run(jobs.files.add, part, tenant=tenant, purpose="batch", filename=upload.filename)
        finally:
            part.unlink(missing_ok=True)
        return JSONResponse(file_object(record))

    async def list(self, request: Request) -> Response:
        values = query(request, ("purpose", "limit", "order", "after"))
        order = values.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order must be asc or desc, not {order[:40]!r}.", param="order")
        limit = query_limit(values, default=10_000, most=10_000)
        jobs = await self._batches.jobs()
        records, has_more = await jobs.run(
            jobs.files.list, request.state.tenant, purpose=values.get("purpose"), after=values.get("after"), limit=limit, order=order
        )
        return JSONResponse(list_object([file_object(record) for record in records], has_more))

    async def one(self, request: Request) -> Response:
        jobs = await self._batches.jobs()
        record = await own_file(jobs, request.state.tenant, request.path_params["file_id"])
        if request.method != "DELETE":
            return JSONResponse(file_object(record))
        if await jobs.run(jobs.files.is_awaited, record.file_id):
            raise InvalidRequest(
                "A batch has still to read this file; wait until it is in progress, or cancel it.", param="file_id", code="file_in_use"
            )
        await jobs.run(jobs.files.delete, record.file_id)
        return JSONResponse({"id": record.file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        jobs = await self._batches.jobs()
        record = await own_file(jobs, request.state.tenant, request.path_params["file_id"])
        try:
            stream = jobs.files.path(record.file_id).open("rb")
        except FileNotFoundError:  # deleted meanwhile
            raise no_file(record.file_id) from None
        headers = {"content-length": str(record.size)}
        return StreamingResponse(pieces_of(stream), media_type="application/octet-stream", headers=headers)


def routes(service: Service, batches: BatchService) -> list[Route]:
    files = Files(service, batches)
    return [
        Route("/v1/files", files.collection, methods=["GET", "POST"]),
        Route("/v1/files/{file_id}", files.one, methods=["GET", "DELETE"]),
        Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
    ]
