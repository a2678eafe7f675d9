"""Each test that asks for `isa` runs once for every instruction set of this machine; without a compiler those tests say so and skip."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from headrace.kernels import cpu
from headrace.kernels.cpu.build import INSTRUCTION_SETS, KernelBuildError, build, compiler_accepts, cpu_flags
from headrace.models.gguf_blocks import dequantize
from headrace.models.gguf_formats import FORMATS

FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}

# where the float16 scales and minima of a block lie
SCALES = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 11: (108,), 12: (0, 2), 13: (0, 2), 14: (208,)}

USABLE = [name for name, each in INSTRUCTION_SETS.items() if each.cpu_flags <= cpu_flags()]


@pytest.fixture(scope="session")
def all_built():
    """Compiles side by side what isn't in the cache yet; where that fails, each test's own `load` says why."""
    with contextlib.suppress(KernelBuildError), ThreadPoolExecutor(2) as pool:
        list(pool.map(build, ["ops", *(name for name in USABLE if compiler_accepts(INSTRUCTION_SETS[name].compiler_flags))]))


@pytest.fixture(params=USABLE)
def isa(request, all_built):
    loaded = cpu.load(request.param)
    if loaded is None:
        pytest.skip(f"no {request.param} kernels: {cpu.reason()}")
    assert loaded.isa == request.param
    return request.param


@pytest.fixture
def kernels():
    """The machine's best instruction set."""
    loaded = cpu.load()
    if loaded is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    return loaded


def random_blocks(type_number: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """uint8 blocks of any bits, with scales of ordinary size."""
    rng = np.random.default_rng(seed)
    if type_number in FLOATS:
        values = torch.randn(rows * columns, generator=torch.Generator().manual_seed(seed))
        return values.to(FLOATS[type_number]).view(torch.uint8)
    block_format = FORMATS[type_number]
    count = rows * columns // block_format.block_size
    raw = rng.integers(0, 256, (count, block_format.block_bytes), dtype=np.uint8)
    for offset in SCALES[type_number]:
        size = 1e-4 if block_format.block_size == 256 else 1e-3 if offset == 0 else 1e-2
        raw[:, offset : offset + 2] = (rng.standard_normal((count, 1)) * size).astype("<f2").view(np.uint8)
    return torch.from_numpy(raw.reshape(-1))


def dequantized(type_number: int, raw: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(dequantize(raw.numpy(), FORMATS[type_number])).view(rows, columns)
