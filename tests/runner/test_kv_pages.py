"""Pages of the KV storage are there before a step writes to them, and what blocks hold stays as it is."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

from headrace.engine.heap import MADV_DONTNEED
from headrace.runner.kv_pages import KVPages
from headrace.runner.kv_storage import KVShape, KVStorage
from tests.patience import until

SHAPE = KVShape(num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.float32)  # 16 KiB a block of keys, and of values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")


@pytest.fixture
def storage() -> KVStorage:
    """Without a page: its memory may be some that a test before it had."""
    storage = KVStorage(SHAPE, num_blocks=2048, num_host_blocks=0, device=torch.device("cpu"))
    page = os.sysconf("SC_PAGE_SIZE")
    for cache in (cache for layer in storage.caches for cache in layer):
        begin, end = -(-cache.data_ptr() // page) * page, (cache.data_ptr() + cache.nbytes) // page * page
        assert ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED) == 0
    return storage


def resident(storage: KVStorage, block: int) -> bool:
    """Whether the middle of a block has a page in all its layers: bit 63 of its entry in the process's page map."""
    places = [cache[block].data_ptr() + cache[block].nbytes // 2 for layer in storage.caches for cache in layer]
    entries = []
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for place in places:
            pages.seek(place // os.sysconf("SC_PAGE_SIZE") * 8)
            entries.append(int.from_bytes(pages.read(8), "little"))
    return all(entry >> 63 for entry in entries)


def test_pages_stay_ahead_of_what_is_used(storage: KVStorage) -> None:
    storage.caches[0][0][0] = 7.0
    pages = KVPages(storage, ahead_bytes=100 * SHAPE.block_bytes)
    pages.use((0, 2))  # before the start, as when the runner tries itself
    assert not resident(storage, 50)
    pages.start()
    try:
        until(lambda: pages.num_taken >= 103)
        assert resident(storage, 102)
        assert not resident(storage, 1000)  # far enough for huge pages
        pages.use((1,))  # one that was used before
        pages.use(())
        pages.use((3, 1400))
        until(lambda: pages.num_taken >= 1501)
        assert resident(storage, 1500)
        assert not resident(storage, 1900)
        pages.use((2047,))
        until(lambda: pages.num_taken >= 2048)
    finally:
        pages.close()
    assert pages.num_taken == 2048
    assert storage.caches[0][0][0].eq(7.0).all()
    assert not resident(storage, 1000), "blocks that were skipped are left to who writes them"


def test_no_block_fits_what_may_be_taken_ahead(storage: KVStorage) -> None:
    pages = KVPages(storage, ahead_bytes=SHAPE.block_bytes - 1)
    pages.start()
    pages.use((5,))
    pages.close()
    assert pages.num_taken == 0
