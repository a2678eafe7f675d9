"""One SQLite database in a folder that one process holds at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import StartError

DATABASE = "batches.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    file_id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,
    size INTEGER NOT NULL, created_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, seq);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER, output_file_id TEXT, error_file_id TEXT, errors TEXT NOT NULL DEFAULT '[]',
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, seq);
CREATE INDEX IF NOT EXISTS batches_unfinished ON batches (seq) WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, -- 0 waiting, 1 taken, 2 answered, 3 answered with an error
    attempts INTEGER NOT NULL DEFAULT 0, result BLOB,
    PRIMARY KEY (batch_id, number)
);
CREATE INDEX IF NOT EXISTS lines_waiting ON lines (batch_id, number) WHERE state = 0;
"""


class Database:
    """Used by one thread at a time. Raises `StartError` where the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        try:
            self.files.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartError(f"The batch folder {folder} cannot be used: {error}. Give another one with --batch-dir.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StartError(f"The batch folder {folder} is in use by another server. Give this one its own with --batch-dir.") from None
        try:
            self.connection = self._open()
        except sqlite3.Error as error:
            os.close(self._lock)
            raise StartError(f"The batch database {folder / DATABASE} cannot be used: {error}. Repair or remove it, or give --batch-dir.") from None

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.folder / DATABASE, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA auto_vacuum = FULL")  # what finished batches took is given back; before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(SCHEMA)
        connection.execute("UPDATE lines SET state = 0 WHERE state = 1")  # taken by a process that is gone
        return connection

    def reader(self) -> sqlite3.Connection:
        """A second connection, for another thread; close it."""
        return sqlite3.connect(f"file:{self.folder / DATABASE}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """All or nothing, also where the process is killed. `durable`: where the machine loses power as well."""
        if durable:
            self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        else:
            self.connection.execute("COMMIT")
        finally:
            if durable:
                self.connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        self.connection.close()
        os.close(self._lock)
