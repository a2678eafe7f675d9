"""Loads the operators `torch.ops.headrace_cpu` and chooses the instruction set they compute with."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels.cpu.build import INSTRUCTION_SETS, KernelBuildError, build, compiler_accepts, cpu_flags

logger = logging.getLogger("headrace.kernels")

ISA_VARIABLE = "HEADRACE_CPU_ISA"
_X86_64_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18  # the system call, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """What is loaded."""

    isa: str  # a key of build.INSTRUCTION_SETS
    ops_library: Path
    kernel_library: Path


@dataclass(slots=True, kw_only=True)
class _State:
    kernels: CpuKernels | None = None
    reason: str | None = None  # why there are none
    wanted: str | None = None  # the instruction set that was asked for, "" for the best one; None: nothing was tried yet
    ops_loaded: bool = False


_state = _State()
_lock = threading.Lock()


def load(isa: str | None = None) -> CpuKernels | None:
    """Build (once a machine) and load the kernels; None where that isn't possible, and `reason()` says why.

    `isa`: an instruction set by name; default `$HEADRACE_CPU_ISA`, else the best of this machine. "off" loads none. Loading another one
    later changes what all operators of the process compute with. Raises ConfigError for a name that isn't known.
    """
    wanted = isa or os.environ.get(ISA_VARIABLE) or ""
    if wanted not in ("", "off", *INSTRUCTION_SETS):
        raise ConfigError(f"{ISA_VARIABLE} is {wanted!r}; it must be one of {', '.join(INSTRUCTION_SETS)}, or off.")
    with _lock:
        if _state.wanted != wanted:
            _state.wanted = wanted
            try:
                _state.kernels, _state.reason = _load(wanted), None
            except KernelBuildError as error:
                _state.kernels, _state.reason = None, str(error)
        return _state.kernels


def use_libraries(kernels: CpuKernels) -> None:
    """Load libraries that were built before, maybe on another machine: from now on `load()` gives these, and no compiler is needed.

    Raises ConfigError for an instruction set that isn't known, and KernelBuildError where they can't be loaded here.
    """
    if kernels.isa not in INSTRUCTION_SETS:
        raise ConfigError(f"There are no kernels for the instruction set {kernels.isa!r}; there are for {', '.join(INSTRUCTION_SETS)}.")
    if not is_usable(kernels.isa):
        raise KernelBuildError(f"this processor has no {kernels.isa}")
    with _lock:
        _open(kernels)
        _state.kernels, _state.reason, _state.wanted = kernels, None, os.environ.get(ISA_VARIABLE) or ""


def reason() -> str | None:
    """Why the last `load` found none, or None where kernels are loaded or nothing was tried."""
    return _state.reason


def is_usable(isa: str) -> bool:
    """Whether this process may compute with an instruction set: the processor has it, and the system gives its threads room for AMX tiles."""
    flags = INSTRUCTION_SETS[isa].cpu_flags
    return flags <= cpu_flags() and ("amx_tile" not in flags or _may_use_tiles())


@cache
def _may_use_tiles() -> bool:
    """Asks for all threads of this process, as Linux wants it before the first tile is loaded."""
    answer = ctypes.CDLL(None, use_errno=True).syscall(_X86_64_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)
    if answer != 0:
        logger.warning("this processor has AMX, but the system lets no process use it: %s", os.strerror(ctypes.get_errno()))
    return bool(answer == 0)


def _load(wanted: str) -> CpuKernels:
    if wanted == "off":
        raise KernelBuildError(f"{ISA_VARIABLE} is off")
    names = [wanted] if wanted else list(INSTRUCTION_SETS)
    usable = [name for name in names if is_usable(name)]
    if not usable:
        raise KernelBuildError(f"this processor has no {wanted} ({ISA_VARIABLE})")
    isa = next((name for name in usable if compiler_accepts(INSTRUCTION_SETS[name].compiler_flags)), None)
    if isa is None:
        raise KernelBuildError(f"the compiler doesn't know {' '.join(INSTRUCTION_SETS[usable[-1]].compiler_flags)}; use a later one")
    with ThreadPoolExecutor(2) as pool:
        ops_library, kernel_library = pool.map(build, ("ops", isa))
    kernels = CpuKernels(isa=isa, ops_library=ops_library, kernel_library=kernel_library)
    _open(kernels)
    return kernels


def _open(kernels: CpuKernels) -> None:
    try:
        if not _state.ops_loaded:
            torch.ops.load_library(str(kernels.ops_library))
            _register_shapes()
            _state.ops_loaded = True
        library = ctypes.CDLL(str(kernels.kernel_library))
    except OSError as error:
        raise KernelBuildError(f"{error}; delete the file and start again to build it anew") from error
    library.headrace_kernels.restype = ctypes.c_void_p
    torch.ops.headrace_cpu.use_kernels(library.headrace_kernels())


def _register_shapes() -> None:
    """What the operators return, for tracing without data; torch.compile and export then see each as one opaque step."""

    def linear(x: Tensor, packed: Tensor, format: int, rows: int, *args: object) -> Tensor:
        return x.new_empty((*x.shape[:-1], rows))

    def embedding(ids: Tensor, packed: Tensor, format: int, rows: int, columns: int) -> Tensor:
        return torch.empty((*ids.shape, columns), dtype=torch.float32, device=ids.device)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    def paged_attention(q: Tensor, *args: object) -> Tensor:
        return torch.empty_like(q)

    def rope_write_kv(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        kv_heads, head_dim = k_cache.shape[2:]
        return qkv.new_empty((qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim))

    def nothing(*args: object) -> None:
        return None

    for function in (linear, embedding, rms_norm, paged_attention, rope_write_kv):
        torch.library.register_fake(f"headrace_cpu::{function.__name__}", function)
    for name in ("pack_", "mlp_add_", "attention_add_", "layers_add_"):
        torch.library.register_fake(f"headrace_cpu::{name}", nothing)
