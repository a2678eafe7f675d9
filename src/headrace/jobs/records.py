"""What is kept of files, batches and their lines, and what a store of lines must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
EndStatus = Literal["completed", "expired", "cancelled"]
Purpose = Literal["batch", "batch_output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    file_id: str
    tenant: str  # whose it is; nobody else sees it
    purpose: Purpose
    filename: str
    size: int  # bytes
    created_at: int  # Unix seconds, as all times here


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a batch failed its validation."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # of the input file, from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    status: Status
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[Fault, ...] = ()
    total: int = 0  # lines
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of a batch."""

    batch_id: str
    number: int  # of the input file, from 1
    custom_id: str
    body: bytes  # JSON, as it would be posted to the endpoint
    tenant: str = ""
    endpoint: str = ""
    attempts: int = 0  # times that the engine died while it was computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    ok: bool  # goes to the output file, else to the error file
    text: bytes  # the whole line of that file, without its end


class LineQueue(Protocol):
    """The lines of all batches that run. Every call is one transaction: a process that is killed loses and doubles no line."""

    def put(self, batch_id: str, lines: Sequence[Line]) -> None:
        """More lines of a batch that is being validated; they can be taken once it is in progress."""

    def take(self, limit: int) -> list[Line]:
        """Up to `limit` lines that nobody has taken. Tenants take turns; within one, older batches and earlier lines come first."""

    def finish(self, line: Line, result: Result | None, *, engine_died: bool = False) -> None:
        """Keep the result of a line that was taken; a second one for the same line changes nothing. None: the line can be taken again."""
