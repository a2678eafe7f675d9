"""Sessions from one run of the server to the next: written when the engine ends in good order, read before it serves.

Nothing about a file can keep the engine from starting: what cannot be used is named in the log and left out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from headrace.core.kv_manager import BlockTable, KVManager
from headrace.core.sessions import Session
from headrace.engine.session_file import PARTIAL, SUFFIX, Header, SessionFileError, file_bytes, read_blocks, read_header, write_session
from headrace.errors import ConfigError
from headrace.runner.interface import Runner

logger = logging.getLogger("headrace.sessions")


class SessionStore:
    """The files of one directory, which belongs to one server. Raises `ConfigError` where it cannot be used."""

    def __init__(
        self,
        directory: str,
        *,
        quota: int,
        kv: KVManager,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._directory = Path(directory).expanduser().absolute()
        self._quota = quota
        self._kv = kv
        self._runner = runner
        self._clock = clock  # of leases
        self._wall = wall  # of files: seconds since the epoch
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--session-dir {directory} cannot be used: {error.strerror or error}.") from None
        if not os.access(self._directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"--session-dir {directory} cannot be used: it must be readable and writable.")
        self._identity = runner.kv_identity()

    def load(self) -> int:
        """Fills free blocks with the sessions that were used last, and returns how many sessions have come back."""
        found: list[tuple[Path, Header]] = []
        for path in sorted(self._directory.glob("*" + SUFFIX)):
            try:
                header = read_header(path)
                self._check(header)
            except (OSError, SessionFileError) as error:
                logger.warning("the session file %s is not used: %s", path, error)
            else:
                found.append((path, header))
        found.sort(key=lambda item: item[1].lease_end, reverse=True)
        restored: list[tuple[BlockTable, float]] = []
        self._kv.begin_plan(self._clock())
        for path, header in found:
            try:
                table = self._restore(path, header)
            except (OSError, SessionFileError, ValueError) as error:
                logger.warning("the session file %s is not used: %s", path, error)
                continue
            if table is None:
                logger.warning("the session file %s is not used: no KV block is free any more", path)
                continue
            restored.append((table, header.lease_end - self._wall()))
        for table, lease_s in reversed(restored):  # in the order in which their leases end
            self._kv.free(table, lease_s=lease_s)
        self._kv.end_plan()
        if found:
            logger.info("sessions back from %s: %d of %d", self._directory, len(restored), len(found))
        return len(restored)

    def save(self) -> int:
        """Writes the sessions whose lease runs, the latest first, as far as the quota goes; returns how many. Older files of this model go."""
        now = self._clock()
        kept: set[Path] = set()
        used = 0
        for session in self._kv.sessions.live(now):
            blocks = self._blocks(session)
            if not blocks:
                continue
            header = self._header(session, blocks, now)
            if used + file_bytes(header) > self._quota:
                logger.warning("a session of %d blocks is not kept: --session-quota of %d bytes is used up", len(blocks), self._quota)
                continue
            path = self._path(session)
            try:
                write_session(path, header, map(self._runner.read_block, blocks))
            except OSError as error:
                logger.error("the session file %s cannot be written: %s", path, error)
                break
            used += file_bytes(header)
            kept.add(path)
        self._remove_others(kept)
        logger.info("sessions kept in %s: %d", self._directory, len(kept))
        return len(kept)

    def _check(self, header: Header) -> None:
        for name, ours in self._identity.items():
            theirs = header.identity.get(name)
            if theirs != ours:
                raise SessionFileError(f"it was made with another {name}: {theirs}, not {ours}")
        if header.lease_end <= self._wall():
            raise SessionFileError("its lease has ended (--session-lease)")
        if header.num_blocks < 1 or len(header.token_ids) != header.num_blocks * self._kv.block_size:
            raise SessionFileError(f"it has {len(header.token_ids)} tokens in {header.num_blocks} blocks")

    def _restore(self, path: Path, header: Header) -> BlockTable | None:
        """A table that holds the session's blocks; None where not one of them has room."""
        kv = self._kv
        table = kv.new_table(salt=header.salt, tenant=header.tenant, session_id=header.session_id)
        new = kv.restore(table, header.token_ids)
        start, stop = len(table.blocks) - len(new), len(table.blocks)
        try:
            for block, data in zip(new, read_blocks(path, header, start, stop), strict=True):
                self._runner.write_block(block, data)
        except (OSError, SessionFileError, ValueError):
            table.session_id = None  # it is no session's: nothing of it is leased
            kv.free(table)
            raise
        kv.register(table, header.token_ids, stop * kv.block_size)
        return table if table.blocks else None

    def _blocks(self, session: Session) -> list[int]:
        """Of the session's prefix, as far as it is still cached."""
        blocks = []
        for node in session.chain:
            block = self._kv.pool.find(node)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _header(self, session: Session, blocks: list[int], now: float) -> Header:
        return Header(
            identity=self._identity,
            session_id=session.session_id,
            tenant=session.tenant,
            salt=session.salt,
            lease_end=self._wall() + session.lease_until - now,
            token_ids=session.token_ids[: len(blocks) * self._kv.block_size],
            num_blocks=len(blocks),
            block_bytes=len(self._runner.read_block(blocks[0])),
        )

    def _path(self, session: Session) -> Path:
        key = f"{session.tenant}\0{session.session_id}".encode()
        return self._directory / (hashlib.blake2b(key, digest_size=16).hexdigest() + SUFFIX)

    def _remove_others(self, kept: set[Path]) -> None:
        """Files of this model that are no session's any more, and what an interrupted end has left. Other models' files stay."""
        for path in self._directory.iterdir():
            try:
                if path.suffix == PARTIAL or (path.suffix == SUFFIX and path not in kept and read_header(path).identity == self._identity):
                    path.unlink()
            except (OSError, SessionFileError) as error:
                logger.warning("the session file %s stays: %s", path, error)
