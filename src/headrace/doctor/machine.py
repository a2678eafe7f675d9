"""What the machine, the container and the environment take away. Facts are read once, so that checks are functions of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.doctor.finding import Finding, fault, well

MIB = 1 << 20
FREE_MEMORY = 1024 * MIB  # of less, a model and its KV storage hardly find room
SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    num_cpus: int  # of the machine
    num_allowed: int  # that this process may run on
    physical_cores: int  # among those
    quota_cpus: float | None  # of the container; None: no limit
    memory_limit: int | None  # bytes of the container; None: no limit
    memory_available: int | None  # bytes; None: not known
    swap_used: int  # bytes
    numa_nodes: int
    cpu_flags: frozenset[str]
    governors: frozenset[str]  # of frequency scaling; empty: not readable
    throttled: int | None  # times that a core was slowed down for heat; None: not readable
    compiler: str | None  # the C++ compiler that would be used
    load: float  # runnable processes over the last minute
    environment: Mapping[str, str]


def read_machine(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Machine:
    """`root`: where /proc and /sys are."""
    memory = _table(root / "proc/meminfo")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cpu = root / "sys/devices/system/cpu"
    siblings = {_text(cpu / f"cpu{number}/topology/thread_siblings_list") or str(number) for number in allowed}
    throttles = [int(text) for path in cpu.glob("cpu*/thermal_throttle/core_throttle_count") if (text := _text(path)).isdigit()]
    cxx = environment.get("CXX")
    return Machine(
        num_cpus=os.cpu_count() or 1,
        num_allowed=len(allowed),
        physical_cores=max(1, len(siblings)),
        quota_cpus=_quota(_text(root / "sys/fs/cgroup/cpu.max")),
        memory_limit=_number(_text(root / "sys/fs/cgroup/memory.max")),
        memory_available=memory.get("MemAvailable"),
        swap_used=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        cpu_flags=_flags(_text(root / "proc/cpuinfo")),
        governors=frozenset(_text(path) for path in cpu.glob("cpu*/cpufreq/scaling_governor")),
        throttled=max(throttles, default=None),
        compiler=next((path for name in ((cxx,) if cxx else ("g++", "c++", "clang++")) if (path := shutil.which(name))), None),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        environment=dict(environment),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _quota(text: str) -> float | None:
    """cgroup v2: microseconds in a period, or max."""
    parts = text.split()
    return float(parts[0]) / float(parts[1]) if len(parts) == 2 and parts[0].isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2 and row[1].isdigit()}


def _flags(text: str) -> frozenset[str]:
    return frozenset(next((line.partition(":")[2] for line in text.splitlines() if line.startswith("flags")), "").split())


# -- checks ------------------------------------------------------------------------------------------------------------


def cpu_quota(machine: Machine) -> Finding:
    quota, cores = machine.quota_cpus, machine.physical_cores
    if quota is None or quota >= cores:
        return well("cpu-quota", "no limit below the cores" if quota is None else f"{quota:g} CPUs for {cores} cores")
    threads = max(1, int(quota))
    return fault(
        "cpu-quota",
        f"the container may use {quota:g} CPUs, but sees {cores} cores: {cores} compute threads are stopped for a part of every period",
        f"give it {cores} CPUs, or serve with --threads {threads}",
        "steps without stops of up to a tenth of a second",
    )


def memory(machine: Machine) -> Finding:
    available = machine.memory_available
    if machine.memory_limit is not None:
        available = min(available or machine.memory_limit, machine.memory_limit)
    if available is None:
        return well("memory", "how much is free is not readable here")
    if available < FREE_MEMORY:
        return fault(
            "memory",
            f"{available // MIB} MiB are available"
            + (f" (the container's limit is {machine.memory_limit // MIB} MiB)" if machine.memory_limit else ""),
            "raise the limit, or bound the KV storage with --kv-memory",
        )
    return well("memory", f"{available // MIB} MiB are available")


def swap(machine: Machine) -> Finding:
    if machine.swap_used > 256 * MIB and (machine.memory_available or 0) < 4 * FREE_MEMORY:
        return fault(
            "swap",
            f"{machine.swap_used // MIB} MiB are swapped out while little memory is free",
            "lower --kv-memory: weights that are swapped out make steps a thousand times slower",
        )
    return well("swap", f"{machine.swap_used // MIB} MiB are swapped out")


def affinity(machine: Machine) -> Finding:
    if machine.num_allowed < machine.num_cpus:
        return fault(
            "affinity",
            f"this process may run on {machine.num_allowed} of {machine.num_cpus} CPUs",
            "start the server without taskset or a cpuset, if the others are not kept free for something else",
            f"up to {machine.num_cpus / machine.num_allowed:.1f} times the arithmetic",
        )
    return well("affinity", f"all {machine.num_cpus} CPUs may be used")


def numa(machine: Machine) -> Finding:
    if machine.numa_nodes > 1 and machine.num_allowed == machine.num_cpus:
        return fault(
            "numa",
            f"{machine.numa_nodes} memory nodes, and the process is bound to none: weights are read from the other node as well",
            "start one server a node: numactl --cpunodebind=N --membind=N headrace serve ...",
            "decoding reads memory at the speed of its own node",
        )
    return well("numa", f"{machine.numa_nodes} memory node{'s' * (machine.numa_nodes > 1)}")


def load(machine: Machine) -> Finding:
    if machine.load > machine.num_allowed * 1.5:
        return fault(
            "load",
            f"{machine.load:.1f} processes want to run on {machine.num_allowed} CPUs",
            "stop what else runs here, or give it a lower priority (nice)",
        )
    return well("load", f"load {machine.load:.1f} on {machine.num_allowed} CPUs")


def compiler(machine: Machine) -> Finding:
    if machine.compiler is None:
        wanted = machine.environment.get("CXX")
        return fault(
            "compiler",
            f"CXX is {wanted}, which is not on the PATH" if wanted else "there is no C++ compiler on the PATH",
            "install g++, or take a folder of `headrace compile -o DIR` from another machine and serve with --artifacts DIR",
            "kernels of our own instead of torch's operators",
        )
    return well("compiler", machine.compiler)


def instruction_set(machine: Machine) -> Finding:
    from headrace.kernels.cpu.build import INSTRUCTION_SETS

    if not machine.cpu_flags:
        return well("instruction-set", "not readable here")
    usable = [each.name for each in INSTRUCTION_SETS.values() if each.cpu_flags <= machine.cpu_flags]
    wanted = machine.environment.get("HEADRACE_CPU_ISA")
    if wanted and wanted != usable[0]:
        return fault("instruction-set", f"HEADRACE_CPU_ISA is {wanted}, while this processor has {usable[0]}", "unset HEADRACE_CPU_ISA")
    if usable[0] == "generic":
        return fault(
            "instruction-set", "this processor has no AVX2", "use a machine with AVX2 or better: the kernels run without vectors of their own here"
        )
    return well("instruction-set", usable[0])


def threads(machine: Machine) -> Finding:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = machine.environment.get(name, "")
        if text.isdigit() and int(text) > machine.physical_cores:
            return fault(
                "threads", f"{name} is {text} on {machine.physical_cores} cores", f"unset {name}: threads that wait for a core hold up all others"
            )
    for name in SPIN_VARIABLES:
        if machine.environment.get(name, "").lower() in ("active", "infinity"):
            return fault("threads", f"{name} is {machine.environment[name]}: threads that wait keep others from running", f"unset {name}")
    return well("threads", f"{machine.physical_cores} cores")


def clock(machine: Machine) -> Finding:
    slow = machine.governors & {"powersave", "conservative"}
    if slow:
        return fault("clock", f"the frequency governor is {', '.join(sorted(slow))}", "cpupower frequency-set --governor performance")
    if machine.throttled:
        return fault(
            "clock", f"a core was slowed down for heat {machine.throttled} times since the machine started", "look at cooling and power limits"
        )
    return well("clock", f"governor {', '.join(sorted(machine.governors))}" if machine.governors else "not readable here")


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    cpu_quota,
    memory,
    swap,
    affinity,
    numa,
    load,
    compiler,
    instruction_set,
    threads,
    clock,
)
