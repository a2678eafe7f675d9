"""Where figures come from: what has to stand beside them so that somebody who wasn't there can read them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import headrace


def provenance() -> dict[str, Any]:
    """date (UTC), command, machine in words, and the versions of what computes."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "command": shlex.join(["headrace", *sys.argv[1:]]),
        "machine": machine(),
        "headrace_version": headrace.__version__,
        "torch_version": importlib.metadata.version("torch"),
        "python_version": platform.python_version(),
    }


def machine() -> str:
    """The processor, how many of it this process may use, memory and system."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [_processor() or platform.machine(), f"{num_cpus} CPUs"]
    if (memory := _memory()) is not None:
        parts.append(f"{memory:.0f} GiB")
    return ", ".join([*parts, f"{platform.system()} {platform.release()}"])


def _processor() -> str | None:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return None


def _memory() -> float | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) / 2**20
    return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return []


def load_average() -> float | None:
    """Processes that wanted a CPU over the last minute; None where the system doesn't tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
