"""Each check finds its own planted fault, and nothing on a healthy machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.doctor import machine
from headrace.doctor.machine import CHECKS, MIB, Machine, read_machine

HEALTHY = Machine(
    num_cpus=8,
    num_allowed=8,
    physical_cores=4,
    quota_cpus=None,
    memory_limit=None,
    memory_available=16_000 * MIB,
    swap_used=0,
    numa_nodes=1,
    cpu_flags=frozenset({"avx2", "fma", "f16c"}),
    governors=frozenset({"performance"}),
    throttled=0,
    compiler="/usr/bin/g++",
    load=1.0,
    environment={},
)
PLANTED: list[tuple[Callable[[Machine], Any], dict[str, Any], str]] = [
    (machine.cpu_quota, {"quota_cpus": 1.5}, "--threads 1"),
    (machine.memory, {"memory_available": 500 * MIB}, "--kv-memory"),
    (machine.memory, {"memory_limit": 900 * MIB}, "limit"),
    (machine.swap, {"swap_used": 2_000 * MIB, "memory_available": 2_000 * MIB}, "--kv-memory"),
    (machine.affinity, {"num_allowed": 2}, "taskset"),
    (machine.numa, {"numa_nodes": 2}, "numactl"),
    (machine.load, {"load": 30.0}, "nice"),
    (machine.compiler, {"compiler": None}, "g++"),
    (machine.compiler, {"compiler": None, "environment": {"CXX": "clang-99"}}, "g++"),
    (machine.instruction_set, {"environment": {"HEADRACE_CPU_ISA": "generic"}}, "HEADRACE_CPU_ISA"),
    (machine.instruction_set, {"cpu_flags": frozenset({"sse2"})}, "AVX2"),
    (machine.threads, {"environment": {"OMP_NUM_THREADS": "32"}}, "OMP_NUM_THREADS"),
    (machine.threads, {"environment": {"OMP_WAIT_POLICY": "ACTIVE"}}, "OMP_WAIT_POLICY"),
    (machine.clock, {"governors": frozenset({"powersave"})}, "performance"),
    (machine.clock, {"throttled": 40}, "cooling"),
]


@pytest.mark.parametrize(("check", "fields", "remedy"), PLANTED)
def test_a_planted_fault_is_found_by_its_check_alone(check: Callable[[Machine], Any], fields: dict[str, Any], remedy: str):
    sick = replace(HEALTHY, **fields)
    found = [finding for finding in (other(sick) for other in CHECKS) if not finding.ok]
    assert found == [check(sick)]
    assert remedy in found[0].remedy


def test_a_healthy_machine_is_left_alone():
    findings = [check(HEALTHY) for check in CHECKS]
    assert all(finding.ok and finding.remedy is None for finding in findings)
    assert len({finding.check for finding in findings}) == len(CHECKS)
    bounded = replace(HEALTHY, quota_cpus=4.0, memory_limit=8_000 * MIB, environment={"OMP_NUM_THREADS": "4", "HEADRACE_CPU_ISA": "avx2"})
    assert all(check(bounded).ok for check in CHECKS)


def test_nothing_is_said_of_what_cannot_be_read():
    unknown = replace(HEALTHY, memory_available=None, cpu_flags=frozenset(), governors=frozenset(), throttled=None)
    assert all(check(unknown).ok for check in CHECKS)


def test_facts_are_read_from_the_system(tmp_path: Path):
    files = {
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 2048 kB\nSwapTotal: 10 kB\nSwapFree: 4 kB\n",
        "proc/cpuinfo": "processor : 0\nflags : fma avx2 f16c\n\nprocessor : 1\nflags : none\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/memory.max": "1048576\n",
        "sys/devices/system/node/node0/x": "",
        "sys/devices/system/node/node1/x": "",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
        "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = read_machine(tmp_path, {"CXX": "no-such-compiler"})
    assert (facts.memory_available, facts.swap_used, facts.memory_limit, facts.quota_cpus) == (2 * MIB, 6144, MIB, 1.5)
    assert (facts.numa_nodes, facts.governors, facts.throttled, facts.compiler) == (2, {"powersave"}, 7, None)
    assert facts.cpu_flags == {"fma", "avx2", "f16c"}
    assert 1 <= facts.physical_cores <= facts.num_allowed
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert (read_machine(tmp_path).quota_cpus, read_machine(tmp_path).memory_limit) == (None, None)
