"""Memory that was freed, and goes back to the system."""

from __future__ import annotations

import ctypes
import sys


def release_freed_memory() -> None:
    """What loading and large steps have freed stays with the process where other allocations lie behind it: tens of MiB, given back here.

    A few milliseconds, in which other threads of the process wait for memory. Only glibc has something to give back so.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
