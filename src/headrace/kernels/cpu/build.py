"""Compiles the kernels with the machine's own compiler, once: a library lies in the cache under a name made of everything it depends on.

Two kinds of library: the operators (torch's stable C++ interface, any instruction set) and the kernels of one instruction set (no torch).
A file appears in the cache by an atomic rename, and a lock makes processes that start together compile once.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger("headrace.kernels")

SOURCES = Path(__file__).parent / "csrc"
_TIMEOUT_S = 600
_STABLE_INTERFACE = 0x020B000000000000  # of torch 2.11: later versions keep it


class KernelBuildError(Exception):
    """The libraries can't be built here. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    name: str
    cpu_flags: frozenset[str]  # as /proc/cpuinfo calls what the kernels use
    compiler_flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_AVX512_CPU = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})

_AMX = (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_AMX_CPU = _AVX512_CPU | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}

# best first
INSTRUCTION_SETS: dict[str, InstructionSet] = {
    each.name: each
    for each in (
        InstructionSet(name="amx", cpu_flags=_AMX_CPU, compiler_flags=_AMX),
        InstructionSet(name="avx512vnni", cpu_flags=_AVX512_CPU, compiler_flags=_AVX512),
        InstructionSet(name="avxvnni", cpu_flags=frozenset({"avx2", "fma", "f16c", "avx_vnni"}), compiler_flags=(*_AVX2, "-mavxvnni")),
        InstructionSet(name="avx2", cpu_flags=frozenset({"avx2", "fma", "f16c"}), compiler_flags=_AVX2),
        InstructionSet(name="generic", cpu_flags=frozenset(), compiler_flags=()),
    )
}


def cache_folder() -> Path:
    """`kernels` under `$HEADRACE_HOME`, or under `~/.cache/headrace`."""
    home = os.environ.get("HEADRACE_HOME")
    return (Path(home).expanduser().absolute() if home else Path.home() / ".cache" / "headrace") / "kernels"


@cache
def cpu_flags() -> frozenset[str]:
    """What this machine's processor and system offer; empty where the system doesn't say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def find_compiler() -> str:
    """`$CXX`, or the first C++ compiler on the PATH. Raises KernelBuildError."""
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else ("g++", "c++", "clang++")
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise KernelBuildError(f"there is no C++ compiler ({', '.join(names)}) on the PATH; install g++ to get faster kernels")


def build(name: str) -> Path:
    """The library "ops", or that of an instruction set, compiled if it isn't in the cache yet. Raises KernelBuildError."""
    compiler = find_compiler()
    command, inputs = _command(name, compiler)
    key = hashlib.sha256()
    for part in (*command, _compiler_version(compiler), torch.__version__ if name == "ops" else ""):
        key.update(part.encode() + b"\0")
    for source in inputs:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    target = cache_folder() / f"{name}-{key.hexdigest()[:24]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():  # another process may have made it meanwhile
                logger.info("compiling the CPU kernels (%s), once on this machine", name)
                _compile(command, target)
    except OSError as error:
        raise KernelBuildError(f"the kernel cache {target.parent} can't be written ({error}); set HEADRACE_HOME to a folder that can") from error
    return target


def compiler_accepts(flags: tuple[str, ...]) -> bool:
    """Whether the compiler knows the flags at all."""
    tried = subprocess.run([find_compiler(), *flags, "-x", "c++", "-fsyntax-only", os.devnull], capture_output=True, timeout=_TIMEOUT_S, check=False)
    return tried.returncode == 0


def _command(name: str, compiler: str) -> tuple[list[str], list[Path]]:
    """The command without its output file, and all files that it reads of ours."""
    headers = sorted(SOURCES.glob("*.h"))
    if name == "ops":
        root = Path(torch.__file__).parent
        sources = [*sorted(SOURCES.glob("*ops.cpp")), SOURCES / "thread_pool.cpp"]
        flags = ["-std=c++20", "-O2", "-pthread", f"-DTORCH_TARGET_VERSION={_STABLE_INTERFACE:#x}", "-isystem", str(root / "include")]
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu"]
    else:
        sources = [SOURCES / "kernels.cpp"]
        flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-Wno-psabi", f"-DHEADRACE_ISA={name}", *INSTRUCTION_SETS[name].compiler_flags]
        libraries = []
    return [compiler, "-shared", "-fPIC", "-fvisibility=hidden", *flags, *map(str, sources), *libraries], [*sources, *headers]


@cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False).stdout


def _compile(command: list[str], target: Path) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    os.close(descriptor)
    try:
        done = subprocess.run([*command, "-o", temporary], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            log = target.with_suffix(".log")
            log.write_text(f"{' '.join(command)}\n{done.stderr}")
            error = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
            raise KernelBuildError(f"the compiler {command[0]} failed: {error.strip()} (all of it in {log})")
        os.replace(temporary, target)
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"the compiler {command[0]} took longer than {_TIMEOUT_S} s") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
