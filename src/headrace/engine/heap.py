"""Memory that was needed once, and goes back to the system."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
_LIBRARY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p .*/\S+\.so[.0-9]*$")  # start, end
MADV_DONTNEED = 4


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
