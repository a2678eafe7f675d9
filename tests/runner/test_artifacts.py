"""The folder of `headrace compile`: what is in it comes back, and what is torn, foreign or unfinished is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.kernels.cpu.library import ISA_VARIABLE
from headrace.runner.artifacts import MANIFEST, lend_kernels, read_artifacts, write_artifacts
from headrace.runner.buckets import decode_buckets
from headrace.runner.packages import Facts, PackageRefused, platform_name, source_hash
from headrace.runner.step_module import StepShape
from tests.runner.tiny_packed import kernels_or_skip

SHAPE = StepShape(static_length=64, block_size=16)
FACTS: Facts = {"torch": "2.13.0", "platform": platform_name(), "kernels": source_hash(), "instruction set": "avx2", "processor": "avx", "model": "m"}
ONE, TWO = decode_buckets(2)


@pytest.fixture
def kernels() -> cpu.CpuKernels:
    return kernels_or_skip()


@pytest.fixture
def folder(tmp_path: Path, kernels: cpu.CpuKernels) -> Path:
    write_artifacts(tmp_path / "out", FACTS, SHAPE, {ONE: b"first", TWO: b"second"}, kernels)
    return tmp_path / "out"


def refused(action: object, *args: object) -> str:
    with pytest.raises(PackageRefused) as caught:
        action(*args)  # type: ignore[operator]
    return str(caught.value)


def test_what_was_written_comes_back(folder: Path, kernels: cpu.CpuKernels) -> None:
    artifacts = read_artifacts(str(folder))
    assert (artifacts.shape, artifacts.facts, tuple(artifacts.files)) == (SHAPE, FACTS, (ONE, TWO))
    assert artifacts.package(TWO, FACTS) == b"second"
    assert artifacts.package(ONE, FACTS | {"processor": "avx avx2"}) == b"first"
    found = artifacts.kernels()
    assert (found.isa, found.ops_library.parent, found.kernel_library.parent) == (kernels.isa, folder, folder)
    assert found.kernel_library.read_bytes() == kernels.kernel_library.read_bytes()


def test_foreign_packages_are_refused_by_name(folder: Path) -> None:
    artifacts = read_artifacts(str(folder))
    assert refused(artifacts.package, ONE, FACTS | {"torch": "2.14.0"}) == "its torch is 2.14.0 here and 2.13.0 there"
    assert refused(artifacts.package, ONE, FACTS | {"model": "other"}) == "its model is other here and m there"
    assert refused(artifacts.package, ONE, FACTS | {"processor": ""}) == "its processor is of another generation"
    assert (
        refused(replace(artifacts, facts=FACTS | {"platform": "plan9-mips"}).kernels)
        == f"its platform is {platform_name()} here and plan9-mips there"
    )
    assert refused(replace(artifacts, facts=FACTS | {"kernels": "old"}).kernels).endswith("here and old there")


def test_torn_files_are_refused(folder: Path) -> None:
    artifacts = read_artifacts(str(folder))
    (folder / "decode-1.pt2").write_bytes(b"firsT")
    assert refused(artifacts.package, ONE, FACTS) == "decode-1.pt2 is torn: its checksum is not the manifest's"
    (folder / "decode-2.pt2").unlink()
    assert refused(artifacts.package, TWO, FACTS) == "decode-2.pt2 can't be read: No such file or directory"
    library = artifacts.kernels().kernel_library
    library.write_bytes(library.read_bytes()[:-1])
    assert refused(artifacts.kernels) == f"{library.name} is torn: its checksum is not the manifest's"


def test_no_file_outside_of_the_folder_is_opened(folder: Path) -> None:
    artifacts = read_artifacts(str(folder))
    outside = replace(artifacts, files={ONE: ("../decode-1.pt2", artifacts.files[ONE][1])})
    assert refused(outside.package, ONE, FACTS) == "its manifest names '../decode-1.pt2', which is no file of the folder"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"facts": {}}', '{"facts": 5}', "[" * 100_000],
    ids=["empty", "cut", "list", "null", "little", "number", "deep"],
)
def test_torn_manifests_are_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    assert refused(read_artifacts, str(folder)) == f"{folder / MANIFEST} is torn"


def test_an_unknown_kind_of_bucket_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["packages"][0]["kind"] = "quantum"
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert refused(read_artifacts, str(folder)) == f"{folder / MANIFEST} is torn"


def test_an_unfinished_folder_has_no_manifest(tmp_path: Path, folder: Path, kernels: cpu.CpuKernels) -> None:
    assert refused(read_artifacts, str(tmp_path)) == f"there is no {tmp_path / MANIFEST}: write one with `headrace compile`"
    with pytest.raises(ConfigError, match="can't be written"):
        write_artifacts(folder, FACTS, SHAPE, {ONE: b"first"}, replace(kernels, kernel_library=tmp_path / "gone"))
    assert not (folder / MANIFEST).exists(), "an old manifest does not stand beside new files"


def test_kernels_are_lent_or_the_reason_is_logged(
    folder: Path, kernels: cpu.CpuKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lent = lend_kernels(str(folder))
    assert lent is not None
    loaded = cpu.load()
    assert loaded is not None
    assert loaded.kernel_library.parent == folder
    other = "generic" if kernels.isa != "generic" else "avx2"
    monkeypatch.setenv(ISA_VARIABLE, other)
    assert lend_kernels(str(folder)) is None
    assert f"--artifacts {folder} is refused: its instruction set is {kernels.isa}, and {ISA_VARIABLE} asks for {other}" in caplog.text
    monkeypatch.undo()
    (folder / MANIFEST).unlink()
    assert lend_kernels(str(folder)) is None
    assert "write one with `headrace compile`" in caplog.text
    cpu.use_libraries(kernels)


def test_kernels_for_a_processor_that_is_not_this_one(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("headrace.kernels.cpu.library.cpu_flags", frozenset)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["instruction_set"] = "avx512vnni"
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert lend_kernels(str(folder)) is None
    assert "is refused: this processor has no avx512vnni" in caplog.text
