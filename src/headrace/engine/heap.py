"""Memory that was needed once, and goes back to the system."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
_LIBRARY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p .*/\S+\.so[.0-9]*$")  # start, end
MADV_DONTNEED = 4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE_BYTES = 4 * 1024 * 1024  # more than the logits of a usual batch, which come and go with each step


def return_large_blocks_at_once() -> None:
    """glibc has a threshold from which on a block is the system's again when it is freed, but raises it with each one that it sees, up to
    32 MiB: what loading and long prompts have freed then stays between smaller blocks. Here it stands still. Unless the environment sets
    any of glibc's own `MALLOC_...`. To be called before much is allocated.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
            mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def release_freed_memory() -> None:
    """What loading and large steps have freed stays with the process where other allocations lie behind it: tens of MiB, given back here.

    A few milliseconds, in which other threads of the process wait for memory. Only glibc has something to give back so.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def release_code_of_the_start() -> None:
    """Libraries stay in memory page by page as they were touched, most of them by their start alone: 60 MiB of torch. Here all of their
    pages that this process has not changed leave it; those that are needed come back from the system's file cache when they are touched.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/smaps") as lines:
        for start, end in unchanged_mappings(lines):
            madvise(start, end - start, MADV_DONTNEED)


def unchanged_mappings(smaps: Iterable[str]) -> list[tuple[int, int]]:
    """First and last address (exclusive) of what `/proc/PID/smaps` calls parts of libraries, read-only and without a page of the process's
    own, in memory or swapped out: such a page, as the dynamic linker writes some, would be lost.
    """
    found: list[tuple[int, int]] = []
    candidate: tuple[int, int] | None = None
    for line in smaps:
        mapping = _LIBRARY.match(line)
        if mapping is not None:
            candidate = (int(mapping[1], 16), int(mapping[2], 16))
        elif _MAPPING.match(line) is not None or (line.startswith(("Anonymous:", "Swap:")) and line.split()[1] != "0"):
            candidate = None
        elif line.startswith("VmFlags:") and candidate is not None:  # the last line of each
            found.append(candidate)
            candidate = None
    return found
