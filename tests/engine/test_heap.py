"""Giving memory back: what must stay stays."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from headrace.engine.heap import release_code_of_the_start, unchanged_mappings
from tests.patience import LIMIT_S

SMAPS = """\
{range} {permissions} 00001000 08:01 123 {spaces}{path}
Size:                 64 kB
Rss:                  64 kB
Anonymous:             {anonymous} kB
Swap:                  {swap} kB
VmFlags: rd mr mw me
"""


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, True),
        ({"permissions": "r--p"}, True),
        ({"path": "/lib/libstdc++.so.6.0.30"}, True),
        ({"permissions": "rw-p"}, False),  # data
        ({"permissions": "r--s"}, False),
        ({"anonymous": 4}, False),  # relocations
        ({"swap": 4}, False),  # relocations, swapped out
        ({"path": "/models/model.gguf"}, False),
        ({"path": "[heap]"}, False),
        ({"path": ""}, False),
    ],
)
def test_only_unchanged_parts_of_libraries_go(fields: dict[str, object], found: bool) -> None:
    values: dict[str, object] = {
        "range": "7f00-7f10",
        "permissions": "r-xp",
        "anonymous": 0,
        "swap": 0,
        "spaces": " " * 20,
        "path": "/lib/libtorch_cpu.so",
    }
    assert unchanged_mappings(SMAPS.format(**values | fields).splitlines(keepends=True)) == ([(0x7F00, 0x7F10)] if found else [])


def test_a_mapping_that_follows_takes_nothing_from_the_one_before() -> None:
    first = SMAPS.format(range="10-20", permissions="r-xp", anonymous=8, swap=0, spaces=" ", path="/lib/a.so")
    second = SMAPS.format(range="20-30", permissions="r-xp", anonymous=0, swap=0, spaces=" ", path="/lib/a.so")
    heap = SMAPS.format(range="30-40", permissions="rw-p", anonymous=0, swap=0, spaces=" ", path="[heap]")
    assert unchanged_mappings((first + second + heap).splitlines(keepends=True)) == [(0x20, 0x30)]


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has such a threshold")
def test_a_large_block_is_returned_however_large_those_before_it_were() -> None:
    code = """
import ctypes, sys
from pathlib import Path
from headrace.engine.heap import LARGE_BYTES, return_large_blocks_at_once
if sys.argv[1] == "still":
    return_large_blocks_at_once()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
def used():
    block = libc.malloc(2 * LARGE_BYTES)
    ctypes.memset(block, 1, 2 * LARGE_BYTES)
    wall = libc.malloc(64 * 1024)  # what lies behind it
    libc.free(block)
    return wall
used()
before = int(Path("/proc/self/statm").read_text().split()[1])
used()
print(int(Path("/proc/self/statm").read_text().split()[1]) - before)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def kept_pages(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", code, mode], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return int(done.stdout)

    assert kept_pages("still") < 100
    assert kept_pages("as ever") > 1000, "the threshold has grown, so the test can fail"


@pytest.mark.skipif(sys.platform != "linux", reason="others keep what they have touched")
def test_code_comes_back_when_it_is_needed() -> None:
    def file_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2])

    checksum = zlib.crc32(b"stone" * 1000)
    before = file_pages()
    release_code_of_the_start()
    assert file_pages() < before / 2
    assert zlib.crc32(b"stone" * 1000) == checksum
