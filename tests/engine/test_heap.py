"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes

import psutil
import pytest

from headrace.engine.heap import release_freed_memory


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps what is freed, and gives it back when told to")
def test_memory_behind_which_something_lives_is_given_back():
    process = psutil.Process()
    blocks = [bytearray(4096) for _ in range(16_384)]
    full = process.memory_info().rss
    kept = blocks[::256]
    del blocks
    release_freed_memory()
    assert full - process.memory_info().rss > 32 * 2**20
    assert len(kept) == 64
