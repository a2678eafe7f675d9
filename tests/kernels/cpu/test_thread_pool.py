"""The kernels' own threads: nothing is lost, whoever calls, fails, forks or ends."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.kernels import cpu
from headrace.kernels.cpu.build import SOURCES, KernelBuildError, find_compiler
from tests.kernels.cpu.conftest import random_blocks

TIMEOUT_S = 120


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_pool_itself(tmp_path):
    try:
        compiler = find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    program, source = tmp_path / "thread_pool_test", Path(__file__).with_name("thread_pool_test.cpp")
    flags = ["-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, str(source), str(SOURCES / "thread_pool.cpp"), "-o", str(program)], check=True, timeout=TIMEOUT_S)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_an_error_in_a_part_of_the_work_reaches_the_caller_and_the_next_call_works(kernels, two_threads):
    table = cpu.PackedEmbedding(cpu.pack(0, random_blocks(0, 64, 32), 64, 32))
    ids = torch.arange(1000) % 64
    want = table(ids)
    ids[700] = 64
    for _ in range(20):
        with pytest.raises(RuntimeError, match="id 64 is outside"):
            table(ids)
    ids[700] = 700 % 64
    assert torch.equal(table(ids), want)


def test_calls_from_several_threads(kernels, two_threads):
    layer = cpu.PackedLinear(cpu.pack(3, random_blocks(3, 256, 256), 256, 256))
    x = torch.randn(64, 256)
    want = layer(x)

    def compute(_: int) -> bool:
        torch.set_num_threads(2)  # each thread has its own number
        return all(torch.equal(layer(x), want) for _ in range(50))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(compute, range(4)))


PROGRAM = """
import os, sys, torch
from headrace.kernels import cpu
if cpu.load() is None:
    sys.exit(3)
torch.set_num_threads(2)
norm = torch.ones(512)
x = torch.randn(512, 512)
want = cpu.rms_norm(x, norm, 1e-6)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(cpu.rms_norm(x, norm, 1e-6), want) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(cpu.rms_norm(x, norm, 1e-6), want)
"""


def test_a_fork_computes_and_the_process_ends(kernels):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
