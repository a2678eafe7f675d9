from __future__ import annotations

from types import ModuleType

import pytest

from tests.scripts.load_script import load_script

STATUS = """Name:\tpython
VmHWM:\t  204800 kB
VmRSS:\t  153600 kB
RssAnon:\t  102400 kB
RssFile:\t   50176 kB
RssShmem:\t    1024 kB
Threads:\t4
"""


@pytest.fixture(scope="module")
def footprint() -> ModuleType:
    return load_script("footprint")


def test_what_a_process_holds(footprint: ModuleType) -> None:
    found = footprint.holding("engine", STATUS)
    assert (found.own, found.files, found.peak) == (100.0, 50.0, 200.0)
    assert footprint.table([found, found]).splitlines()[-1] == "| all | 200 | 100 | 400 |"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-m", "headrace", "serve", "--port", "0"], "HTTP"),
        (["python", "-m", "headrace.engine.engine_host", "4"], "engine"),
        (["python", "-m", "headrace.text.grammar_worker"], "grammar_worker"),
        (["/usr/bin/c++"], "c++"),
    ],
)
def test_processes_have_names(footprint: ModuleType, command: list[str], name: str) -> None:
    assert footprint.name_of(command) == name
