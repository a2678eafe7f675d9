"""How much memory there is, and threads to work with."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_host_memory() -> int | None:
    """Bytes that this process can still take without swapping: the machine's, or its container's where that is less. None: not known."""
    found = [amount for amount in (_available_on_machine(), _available_in_container()) if amount is not None]
    return min(found, default=None)


def _available_on_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _available_in_container() -> int | None:
    """From cgroup v2, as a container sees it: its own limit at the root."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:  # no such controller here
        return None
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))  # the page cache gives way


def physical_cores() -> int:
    """Physical cores that this process may run on: two hyperthreads of one core count once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores: set[str] = set()
    for cpu in allowed:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:  # not told: each counts
            cores.add(f"cpu{cpu}")
    return max(1, len(cores))
