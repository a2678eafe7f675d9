"""Building, caching and choosing the kernels; what a machine without a compiler is told."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.kernels.cpu import build as builder
from headrace.kernels.cpu import library


def test_no_compiler_is_a_reason_not_a_crash(tmp_path, monkeypatch):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "from headrace.kernels import cpu; assert cpu.load() is None; print(cpu.reason())"],
        env={**os.environ, "PATH": str(tmp_path), "CXX": "", "HEADRACE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "there is no C++ compiler" in done.stdout
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(builder.KernelBuildError, match="no-such-compiler"):
        builder.build("generic")


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\necho "x.h:1: error: disk of cheese" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    with pytest.raises(builder.KernelBuildError, match="disk of cheese"):
        builder.build("generic")
    assert not list((tmp_path / "kernels").glob("*.so"))
    assert not list((tmp_path / "kernels").glob("*.tmp"))


def test_the_variable_chooses_and_unknown_names_are_refused(kernels, monkeypatch):
    try:
        monkeypatch.setenv(library.ISA_VARIABLE, "generic")
        assert cpu.load().isa == "generic"
        monkeypatch.setenv(library.ISA_VARIABLE, "off")
        assert cpu.load() is None
        assert "is off" in cpu.reason()
        monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
        with pytest.raises(ConfigError, match=r"'mmx'; it must be one of .*avx2"):
            cpu.load()
    finally:
        monkeypatch.undo()
        cpu.load()


def test_an_instruction_set_that_the_processor_lacks(monkeypatch):
    monkeypatch.setattr(library, "cpu_flags", frozenset)
    try:
        assert cpu.load("avx2") is None
        assert "no avx2" in cpu.reason()
    finally:
        monkeypatch.undo()
        cpu.load()


def test_processes_that_start_together_compile_once(tmp_path, monkeypatch):
    calls = []

    def compile_once(command, target):
        calls.append(target)
        target.write_bytes(b"library")

    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(builder, "find_compiler", lambda: sys.executable)
    monkeypatch.setattr(builder, "_compile", compile_once)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(builder.build, ["generic"] * 4))
    assert len(calls) == len(paths) == 1


def test_the_name_of_a_library_depends_on_what_it_is_made_of(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(builder, "find_compiler", lambda: sys.executable)
    monkeypatch.setattr(builder, "_compile", lambda command, target: target.write_bytes(b""))
    names = {builder.build("generic"), builder.build("avx2"), builder.build("ops")}
    monkeypatch.setattr(builder.torch, "__version__", "9.9.9")
    names.add(builder.build("ops"))
    assert builder.build("generic") in names, "the kernels don't depend on torch"
    monkeypatch.setattr(builder, "_compiler_version", lambda compiler: "another one")
    names.add(builder.build("generic"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    for file in builder.SOURCES.iterdir():
        (sources / file.name).write_bytes(file.read_bytes() + b"\n")
    monkeypatch.setattr(builder, "SOURCES", sources)
    names.add(builder.build("generic"))
    assert len(names) == 6


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "kernels").write_text("a file in the way")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(builder, "find_compiler", lambda: sys.executable)
    with pytest.raises(builder.KernelBuildError, match="set HEADRACE_HOME"):
        builder.build("generic")
