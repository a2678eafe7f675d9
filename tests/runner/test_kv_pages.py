"""Pages of the KV storage are there before a step writes to them, and what blocks hold stays as it is."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from headrace.runner.kv_pages import KVPages
from headrace.runner.kv_storage import KVShape, KVStorage

SHAPE = KVShape(num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.float32)  # 16 KiB a block of keys, and of values
PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")


@pytest.fixture
def storage() -> KVStorage:
    return KVStorage(SHAPE, num_blocks=512, num_host_blocks=0, device=torch.device("cpu"))


def resident(storage: KVStorage, block: int) -> bool:
    """Whether the middle of a block has a page in all its layers: bit 63 of its entry in the process's page map."""
    places = [cache[block].data_ptr() + cache[block].nbytes // 2 for layer in storage.caches for cache in layer]
    entries = []
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for place in places:
            pages.seek(place // 4096 * 8)
            entries.append(int.from_bytes(pages.read(8), "little"))
    return all(entry >> 63 for entry in entries)


def wait_for(pages: KVPages, num_blocks: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while pages.num_taken < num_blocks:
        assert time.monotonic() < deadline, f"{pages.num_taken} of {num_blocks} blocks after {PATIENCE_S} s"
        time.sleep(0.01)


def test_pages_stay_ahead_of_what_is_used(storage: KVStorage) -> None:
    storage.caches[0][0][0] = 7.0
    pages = KVPages(storage, ahead_bytes=100 * SHAPE.block_bytes)
    pages.use((0, 2))  # before the start, as when the runner tries itself
    assert not resident(storage, 50)
    pages.start()
    try:
        wait_for(pages, 103)
        assert resident(storage, 102)
        assert not resident(storage, 200)
        pages.use((1,))  # one that was used before
        pages.use(())
        pages.use((3, 150))
        wait_for(pages, 251)
        assert resident(storage, 250)
        assert not resident(storage, 300)
        pages.use((511,))
        wait_for(pages, 512)
    finally:
        pages.close()
    assert pages.num_taken == 512
    assert storage.caches[0][0][0].eq(7.0).all()
    assert not resident(storage, 300), "blocks that were skipped are left to who writes them"


def test_no_block_fits_what_may_be_taken_ahead(storage: KVStorage) -> None:
    pages = KVPages(storage, ahead_bytes=SHAPE.block_bytes - 1)
    pages.start()
    pages.use((5,))
    pages.close()
    assert pages.num_taken == 0
