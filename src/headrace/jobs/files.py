"""Files of all tenants: their content in a folder, what is known of them in the database."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Literal

from headrace.jobs.database import Database
from headrace.jobs.records import FileRecord, Purpose

COLUMNS = "file_id, tenant, purpose, filename, size, created_at"


class FileStore:
    """Used by one thread at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        for stray in database.files.glob("*.part"):  # of uploads that a killed process had begun
            stray.unlink()

    def part(self) -> Path:
        """Where an upload can be written before `add`."""
        return self._database.files / f"{uuid.uuid4().hex}.part"

    def path(self, file_id: str) -> Path:
        return self._database.files / file_id

    def add(self, part: Path, *, tenant: str, purpose: Purpose, filename: str) -> FileRecord:
        """Takes over a file that is complete and synced."""
        record = FileRecord(
            file_id=f"file-{uuid.uuid4().hex}",
            tenant=tenant,
            purpose=purpose,
            filename=filename,
            size=part.stat().st_size,
            created_at=int(time.time()),
        )
        part.rename(self.path(record.file_id))
        sync_folder(self._database.files)
        with self._database.transaction(durable=True) as connection:
            insert_file(connection, record)
        return record

    def get(self, tenant: str, file_id: str) -> FileRecord | None:
        row = self._database.connection.execute(f"SELECT {COLUMNS} FROM files WHERE file_id = ? AND tenant = ?", (file_id, tenant)).fetchone()
        return None if row is None else record_of(row)

    def list(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[list[FileRecord], bool]:
        """(files, whether there are more) behind the file `after`, in order of their making."""
        rows = page(self._database, "files", "file_id", COLUMNS, tenant, after=after, limit=limit, order=order, purpose=purpose)
        return [record_of(row) for row in rows[:limit]], len(rows) > limit

    def stored_bytes(self, tenant: str) -> int:
        return int(self._database.connection.execute("SELECT COALESCE(SUM(size), 0) FROM files WHERE tenant = ?", (tenant,)).fetchone()[0])

    def is_awaited(self, file_id: str) -> bool:
        """Whether a batch has still to read it."""
        query = "SELECT 1 FROM batches WHERE input_file_id = ? AND status = 'validating'"
        return self._database.connection.execute(query, (file_id,)).fetchone() is not None

    def delete(self, file_id: str) -> None:
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM files WHERE file_id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)


def record_of(row: tuple) -> FileRecord:
    file_id, tenant, purpose, filename, size, created_at = row
    return FileRecord(file_id=file_id, tenant=tenant, purpose=purpose, filename=filename, size=size, created_at=created_at)


def insert_file(connection, record: FileRecord) -> None:
    """Once for each id: a second time changes nothing."""
    values = (record.file_id, record.tenant, record.purpose, record.filename, record.size, record.created_at)
    connection.execute(f"INSERT OR IGNORE INTO files ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", values)


def page(
    database: Database, table: str, key: str, columns: str, tenant: str, *, after: str | None, limit: int, order: str, purpose: str | None = None
) -> list[tuple]:
    """One row more than `limit`, if there is one. An `after` that is not known gives nothing."""
    newest_first = order == "desc"
    where, values = "tenant = ?", [tenant]
    if purpose is not None:
        where, values = f"{where} AND purpose = ?", [*values, purpose]
    if after is not None:
        where += f" AND seq {'<' if newest_first else '>'} (SELECT seq FROM {table} WHERE {key} = ? AND tenant = ?)"
        values += [after, tenant]
    query = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY seq {'DESC' if newest_first else 'ASC'} LIMIT ?"
    return database.connection.execute(query, (*values, limit + 1)).fetchall()


def sync_folder(folder: Path) -> None:
    """New names in it survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
