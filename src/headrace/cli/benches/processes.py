"""What a process and those that it has started take."""

from __future__ import annotations

from pathlib import Path


def peak_memory(pid: int) -> int | None:
    """Bytes: the sum of the largest resident sets that the process and its living descendants ever had. None where the system doesn't tell."""
    found = [_peak(process) for process in _family(pid)]
    return sum(size for size in found if size is not None) if any(found) else None


def _family(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        children += [int(child) for child in _text(task / "children").split()]
    return [pid, *(member for child in children for member in _family(child))]


def _peak(pid: int) -> int | None:
    for line in _text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended meanwhile, or this is not Linux
        return ""
