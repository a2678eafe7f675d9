"""Where the engines of this machine run, and where their memory is: read from /proc, for processes of this user."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.doctor.finding import Finding, fault, well

ENGINE = b"headrace.engine.engine_host"
REMOTE_SHARE = 0.1  # of an engine's memory, on nodes where it does not run
STOLEN_SHARE = 0.05  # of the machine's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    pid: int
    cpus: frozenset[int]  # that it may run on
    bytes_by_node: dict[int, int]  # of its memory; empty: not readable


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    engines: tuple[Engine, ...]
    node_cpus: dict[int, frozenset[int]]  # by memory node
    stolen: float | None  # share of the time since the start that a hypervisor gave to others; None: not readable


def read_placement(root: Path = Path("/")) -> Placement:
    """`root`: where /proc and /sys are."""
    engines = tuple(engine for path in sorted((root / "proc").glob("[0-9]*")) if (engine := _engine(path)) is not None)
    nodes = {int(path.name.removeprefix("node")): cpu_list(_text(path / "cpulist")) for path in (root / "sys/devices/system/node").glob("node[0-9]*")}
    return Placement(engines=engines, node_cpus=nodes, stolen=_stolen(_text(root / "proc/stat")))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def cpu_list(text: str) -> frozenset[int]:
    """As Linux writes it: 0-3,8."""
    ends = (part.partition("-")[::2] for part in text.split(",") if part)
    return frozenset(cpu for first, last in ends for cpu in range(int(first), int(last or first) + 1))


def _engine(path: Path) -> Engine | None:
    try:
        command = (path / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if ENGINE not in command:
        return None
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(path / "status"), re.MULTILINE)
    if allowed is None:
        return None  # it has ended
    return Engine(pid=int(path.name), cpus=cpu_list(allowed[1]), bytes_by_node=_bytes_by_node(_text(path / "numa_maps")))


def _bytes_by_node(text: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for line in text.splitlines():
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
            found[int(node)] = found.get(int(node), 0) + int(pages) * 1024 * (4 if size is None else int(size[1]))
    return found


def _stolen(text: str) -> float | None:
    """The eighth number of the first line of /proc/stat, of the first eight."""
    words = text.splitlines()[0].split() if text else []
    if len(words) < 9 or words[0] != "cpu":
        return None
    ticks = [int(word) for word in words[1:9]]
    return ticks[7] / sum(ticks) if sum(ticks) else 0.0


# -- checks ------------------------------------------------------------------------------------------------------------


def shared_cpus(placement: Placement) -> Finding:
    engines = placement.engines
    crowded = [engine for engine in engines if any(engine.cpus & other.cpus for other in engines if other is not engine)]
    if not crowded:
        return well("shared-cpus", f"{len(engines)} engine{'s' * (len(engines) != 1)} here, none beside another")
    return fault(
        "shared-cpus",
        f"{len(crowded)} engines (processes {', '.join(str(engine.pid) for engine in crowded)}) run on the same CPUs, each with threads for all",
        "give each its own: taskset -c 0-7 headrace serve ..., or divide the cores with --threads",
        f"threads that wait for a core hold up a whole step: up to {len(crowded)} times the step time while all are busy",
    )


def remote_memory(placement: Placement) -> Finding:
    worst: tuple[float, Engine] | None = None
    for engine in placement.engines:
        total = sum(engine.bytes_by_node.values())
        remote = sum(size for node, size in engine.bytes_by_node.items() if not placement.node_cpus.get(node, frozenset()) & engine.cpus)
        if total and remote / total >= REMOTE_SHARE and (worst is None or remote / total > worst[0]):
            worst = remote / total, engine
    if worst is None or len(placement.node_cpus) < 2:
        return well("remote-memory", "engines have their memory where they run")
    share, engine = worst
    return fault(
        "remote-memory",
        f"{share:.0%} of the memory of engine {engine.pid} is on nodes where it does not run",
        "bind both together: numactl --cpunodebind=N --membind=N headrace serve ...",
        f"decoding reads all weights each step: {share:.0%} of that at the speed of the link between the nodes",
    )


def stolen_time(placement: Placement) -> Finding:
    if placement.stolen is None:
        return well("stolen-time", "not readable here")
    if placement.stolen < STOLEN_SHARE:
        return well("stolen-time", f"{placement.stolen:.1%} since the machine started")
    return fault(
        "stolen-time",
        f"{placement.stolen:.0%} of the time since the start, the hypervisor ran others on this machine's CPUs",
        "use a machine with CPUs of its own (dedicated, not burstable)",
        f"up to {placement.stolen / (1 - placement.stolen):.0%} more steps, and shorter longest gaps",
    )


CHECKS: tuple[Callable[[Placement], Finding], ...] = (shared_cpus, remote_memory, stolen_time)
