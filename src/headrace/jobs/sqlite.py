"""Batches and their lines in SQLite. Each change of state is one transaction."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from headrace.jobs.database import Database
from headrace.jobs.files import insert_file, page, sync_folder
from headrace.jobs.records import BatchRecord, EndStatus, Fault, FileRecord, Line, Result

WAITING, TAKEN, ANSWERED, ANSWERED_WITH_ERROR = range(4)  # lines.state
FIELDS = tuple(field.name for field in fields(BatchRecord))
COLUMNS = ", ".join(FIELDS)
DELETED_AT_ONCE = 2000  # lines: others get their turn between two transactions
EXPIRED = {"code": "batch_expired", "message": "This request could not be executed before the completion window expired."}


class SqliteStore:
    """A `LineQueue`, and the records of the batches. Used by one thread at a time, but for `write_results`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._turns: dict[str, int] = {}  # tenant -> number of its latest turn
        self._next_turn = 0

    # -- batches -------------------------------------------------------------------------------------------------------

    def add(self, batch: BatchRecord) -> None:
        values = {**asdict(batch), "metadata": None if batch.metadata is None else json.dumps(batch.metadata), "errors": "[]"}
        with self._database.transaction(durable=True) as connection:
            connection.execute(f"INSERT INTO batches ({COLUMNS}) VALUES ({', '.join(f':{name}' for name in FIELDS)})", values)

    def get(self, tenant: str, batch_id: str) -> BatchRecord | None:
        query = f"SELECT {COLUMNS} FROM batches WHERE batch_id = ? AND tenant = ?"
        row = self._database.connection.execute(query, (batch_id, tenant)).fetchone()
        return None if row is None else batch_of(row)

    def list(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """(batches, whether there are more), newest first."""
        rows = page(self._database, "batches", "batch_id", COLUMNS, tenant, after=after, limit=limit, order="desc")
        return [batch_of(row) for row in rows[:limit]], len(rows) > limit

    def unfinished(self) -> list[BatchRecord]:
        query = f"SELECT {COLUMNS} FROM batches WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling') ORDER BY seq"
        return [batch_of(row) for row in self._database.connection.execute(query)]

    def num_unfinished(self, tenant: str) -> int:
        query = "SELECT COUNT(*) FROM batches WHERE tenant = ? AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
        return int(self._database.connection.execute(query, (tenant,)).fetchone()[0])

    def cancel(self, batch_id: str) -> None:
        """Asks for the end; does nothing for a batch that is at its end already."""
        with self._database.transaction(durable=True) as connection:
            connection.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE batch_id = ? AND status IN ('validating', 'in_progress')",
                (int(time.time()), batch_id),
            )

    def fail(self, batch_id: str, faults: Sequence[Fault]) -> None:
        """The validation found faults: no line of the batch runs."""
        with self._database.transaction(durable=True) as connection:
            connection.execute(
                "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? WHERE batch_id = ? AND status = 'validating'",
                (int(time.time()), json.dumps([asdict(fault) for fault in faults]), batch_id),
            )
        self.forget_lines(batch_id)

    def begin(self, batch_id: str, total: int) -> None:
        """The validation is done: the lines can be taken."""
        with self._database.transaction(durable=True) as connection:
            connection.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ? WHERE batch_id = ? AND status = 'validating'",
                (int(time.time()), total, batch_id),
            )

    def stop(self, batch_id: str) -> None:
        """The window is over: no further line is taken."""
        with self._database.transaction(durable=True) as connection:
            connection.execute(
                "UPDATE batches SET status = 'finalizing', finalizing_at = ? WHERE batch_id = ? AND status = 'in_progress'",
                (int(time.time()), batch_id),
            )

    # -- lines ---------------------------------------------------------------------------------------------------------

    def put(self, batch_id: str, lines: Sequence[Line]) -> None:
        with self._database.transaction() as connection:
            connection.executemany(
                "INSERT INTO lines (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?)",
                [(batch_id, line.number, line.custom_id, line.body) for line in lines],
            )

    def take(self, limit: int) -> list[Line]:
        taken: list[Line] = []
        with self._database.transaction() as connection:
            rows = connection.execute(
                "SELECT tenant, batch_id, endpoint FROM batches WHERE status = 'in_progress' "
                "AND EXISTS (SELECT 1 FROM lines WHERE lines.batch_id = batches.batch_id AND state = 0) ORDER BY seq"
            ).fetchall()
            oldest: dict[str, tuple[str, str]] = {}
            for tenant, batch_id, endpoint in rows:
                oldest.setdefault(tenant, (batch_id, endpoint))
            tenants = sorted(oldest, key=lambda tenant: self._turns.get(tenant, -1))
            for place, tenant in enumerate(tenants):
                share = -(-(limit - len(taken)) // (len(tenants) - place))
                if share < 1:
                    break
                batch_id, endpoint = oldest[tenant]
                self._turns[tenant] = self._next_turn = self._next_turn + 1
                found = connection.execute(
                    "UPDATE lines SET state = 1 WHERE batch_id = ?1 AND number IN "
                    "(SELECT number FROM lines WHERE batch_id = ?1 AND state = 0 ORDER BY number LIMIT ?2) "
                    "RETURNING number, custom_id, body, attempts",
                    (batch_id, share),
                )
                lines = [
                    Line(batch_id=batch_id, number=number, custom_id=custom_id, body=body, tenant=tenant, endpoint=endpoint, attempts=attempts)
                    for number, custom_id, body, attempts in found
                ]
                taken += sorted(lines, key=lambda line: line.number)
        return taken

    def finish(self, line: Line, result: Result | None, *, engine_died: bool = False) -> None:
        key = (line.batch_id, line.number)
        with self._database.transaction() as connection:
            if result is None:
                connection.execute(
                    "UPDATE lines SET state = 0, attempts = attempts + ? WHERE batch_id = ? AND number = ? AND state = 1", (engine_died, *key)
                )
                return
            state = ANSWERED if result.ok else ANSWERED_WITH_ERROR
            done = connection.execute(
                "UPDATE lines SET state = ?, result = ?, body = x'' WHERE batch_id = ? AND number = ? AND state = 1", (state, result.text, *key)
            )
            if not done.rowcount:
                return
            column = "completed" if result.ok else "failed"
            connection.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE batch_id = ?", (line.batch_id,))
            connection.execute(
                "UPDATE batches SET status = 'finalizing', finalizing_at = ? "
                "WHERE batch_id = ? AND status = 'in_progress' AND completed + failed = total",
                (int(time.time()), line.batch_id),
            )

    def forget_lines(self, batch_id: str) -> None:
        """Some at a time; the batch must be ended, or be validated anew."""
        while True:
            with self._database.transaction() as connection:
                query = "DELETE FROM lines WHERE batch_id = ?1 AND number IN (SELECT number FROM lines WHERE batch_id = ?1 LIMIT ?2)"
                if connection.execute(query, (batch_id, DELETED_AT_ONCE)).rowcount < DELETED_AT_ONCE:
                    return

    # -- the end -------------------------------------------------------------------------------------------------------

    def write_results(self, batch: BatchRecord, status: EndStatus) -> list[FileRecord]:
        """Write the output file and the error file, for `end`; what they would be empty is not written. In any thread.

        Their names follow from the batch, so that a process that was killed meanwhile writes the same ones again.
        """
        records = []
        reader = self._database.reader()
        try:
            for kind, state in (("output", ANSWERED), ("error", ANSWERED_WITH_ERROR)):
                file_id = "file-" + hashlib.blake2b(f"{batch.batch_id} {kind}".encode(), digest_size=16).hexdigest()
                states = (state, WAITING, TAKEN) if kind == "error" and status == "expired" else (state,)
                query = (
                    f"SELECT number, custom_id, result FROM lines WHERE batch_id = ? AND state IN ({', '.join('?' * len(states))}) ORDER BY number"
                )
                part = self._database.files / f"{file_id}.part"
                with part.open("wb") as stream:
                    for number, custom_id, result in reader.execute(query, (batch.batch_id, *states)):
                        stream.write((result or expired_line(batch.batch_id, number, custom_id)) + b"\n")
                    stream.flush()
                    os.fsync(stream.fileno())
                    size = stream.tell()
                if not size:
                    part.unlink()
                    continue
                part.rename(self._database.files / file_id)
                records.append(
                    FileRecord(
                        file_id=file_id,
                        tenant=batch.tenant,
                        purpose="batch_output",
                        filename=f"{batch.batch_id}_{kind}.jsonl",
                        size=size,
                        created_at=int(time.time()),
                    )
                )
        finally:
            reader.close()
        sync_folder(self._database.files)
        return records

    def end(self, batch: BatchRecord, status: EndStatus, files: Sequence[FileRecord]) -> None:
        by_kind = {record.filename.removesuffix(".jsonl").rpartition("_")[2]: record.file_id for record in files}
        now = int(time.time())
        with self._database.transaction(durable=True) as connection:
            for record in files:
                insert_file(connection, record)
            connection.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, finalizing_at = COALESCE(finalizing_at, ?), output_file_id = ?, error_file_id = ? "
                "WHERE batch_id = ? AND status IN ('in_progress', 'finalizing', 'cancelling')",
                (status, now, None if status == "cancelled" else now, by_kind.get("output"), by_kind.get("error"), batch.batch_id),
            )
        self.forget_lines(batch.batch_id)


def batch_of(row: Sequence[Any]) -> BatchRecord:
    values = dict(zip(FIELDS, row, strict=True))
    values["metadata"] = None if values["metadata"] is None else json.loads(values["metadata"])
    values["errors"] = tuple(Fault(**fault) for fault in json.loads(values["errors"]))
    return BatchRecord(**values)


def expired_line(batch_id: str, number: int, custom_id: str) -> bytes:
    return json.dumps({"id": line_id(batch_id, number), "custom_id": custom_id, "response": None, "error": EXPIRED}).encode()


def line_id(batch_id: str, number: int) -> str:
    """The id of a line's result."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
