from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.doctor import placement
from headrace.doctor.placement import CHECKS, Engine, Placement, cpu_list, read_placement

NODES = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
FIRST = Engine(pid=10, cpus=NODES[0], bytes_by_node={0: 1000, 1: 10})
SECOND = Engine(pid=11, cpus=NODES[1], bytes_by_node={1: 1000})
ALONE = Placement(engines=(FIRST, SECOND), node_cpus=NODES, stolen=0.001)
PLANTED: list[tuple[Callable[[Placement], Any], Placement, str]] = [
    (placement.shared_cpus, replace(ALONE, engines=(FIRST, replace(SECOND, cpus=frozenset({1, 2, 3}), bytes_by_node={}))), "10, 11"),
    (placement.remote_memory, replace(ALONE, engines=(FIRST, replace(SECOND, bytes_by_node={0: 600, 1: 400}))), "60%"),
    (placement.stolen_time, replace(ALONE, stolen=0.2), "20%"),
]


@pytest.mark.parametrize(("check", "sick", "evidence"), PLANTED)
def test_a_planted_fault_is_found_by_its_check_alone(check: Callable[[Placement], Any], sick: Placement, evidence: str):
    found = [finding for finding in (other(sick) for other in CHECKS) if not finding.ok]
    assert found == [check(sick)]
    assert evidence in found[0].evidence
    assert found[0].remedy
    assert found[0].gain


def test_a_healthy_machine_is_left_alone():
    assert all(check(ALONE).ok for check in CHECKS)
    unknown = Placement(engines=(replace(FIRST, bytes_by_node={}),), node_cpus={}, stolen=None)
    assert all(check(unknown).ok for check in CHECKS)


def test_facts_are_read_from_the_system(tmp_path: Path):
    files = {
        "proc/stat": "cpu  60 0 10 20 0 0 0 10 5 0\ncpu0 1 2 3\n",
        "proc/10/cmdline": "python\0-m\0headrace.engine.engine_host\x005\0",
        "proc/10/status": "Name:\tpython\nCpus_allowed_list:\t0-1,4\n",
        "proc/10/numa_maps": "7f00 default anon=3 N0=2 N1=1 kernelpagesize_kB=4\n7f01 default N1=1 kernelpagesize_kB=2048\n",
        "proc/11/cmdline": "grep\0headrace.engine\0",
        "proc/12/cmdline": "python\0-m\0headrace.engine.engine_host\x005\0",  # it has ended: no status
        "sys/devices/system/node/node0/cpulist": "0-3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    engine = Engine(pid=10, cpus=frozenset({0, 1, 4}), bytes_by_node={0: 8192, 1: 4096 + 2048 * 1024})
    assert read_placement(tmp_path) == Placement(engines=(engine,), node_cpus={0: frozenset({0, 1, 2, 3})}, stolen=0.1)
    assert read_placement(tmp_path / "nothing") == Placement(engines=(), node_cpus={}, stolen=None)
    assert cpu_list("") == frozenset()
