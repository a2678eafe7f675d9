"""Pages of the KV storage, taken from the system before a step writes to them.

Host memory comes page by page when it is first written, a microsecond or several each: a prompt of 128 tokens of a small model enters 720 new pages.
Whoever waits for its first token should not wait for those. So a thread of low priority stays a few thousand tokens ahead of the highest block
that any step has used; blocks that were never used are given out in order (`core.block_pool`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import suppress

from headrace.runner.kv_storage import KVStorage

AHEAD_BYTES = 48 * 1024 * 1024
_BLOCKS_AT_ONCE = 32
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_NICENESS = 10


class KVPages:
    """Starts with nothing taken. Only on Linux; elsewhere, and where the system refuses, pages come when they are written."""

    def __init__(self, storage: KVStorage, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self.num_taken = 0  # the first so many blocks have their pages
        self._storage = storage
        self._ahead = ahead_bytes // storage.shape.block_bytes
        self._used = 0  # no block from this one on was used
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="KV pages", daemon=True)

    def start(self) -> None:
        if sys.platform == "linux" and self._storage.device.type == "cpu" and self._ahead:
            self._thread.start()

    def use(self, blocks: tuple[int, ...]) -> None:
        """A step is about to write to these blocks. Takes no time."""
        end = max(blocks, default=-1) + 1
        if end > self._used:
            with self._changed:
                self._used = end
                self._changed.notify()

    def close(self) -> None:
        """Returns when the storage is touched no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _wanted(self) -> int:
        return min(self._used + self._ahead, self._storage.num_blocks)

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted() > self.num_taken)
                if self._closed:
                    return
                first = max(self.num_taken, self._used)  # blocks that are used have their pages
                last = min(first + _BLOCKS_AT_ONCE, self._wanted())
            if first < last and not self._take(first, last):
                return
            self.num_taken = max(first, last)

    def _take(self, first: int, last: int) -> bool:
        """Pages of blocks [first, last); False where the system does not give them so."""
        madvise = ctypes.CDLL(None).madvise
        page = os.sysconf("SC_PAGE_SIZE")
        for layer in self._storage.caches:
            for cache in layer:
                size = cache[0].nbytes
                begin = (cache.data_ptr() + first * size) // page * page
                end = cache.data_ptr() + last * size
                if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE) != 0:
                    return False
        return True
