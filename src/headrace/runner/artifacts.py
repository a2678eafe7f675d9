"""Prepared packages and kernels in a folder, for machines without a compiler: `headrace compile` writes them, `--artifacts` serves with them.

`manifest.json` says what they were made for and holds the checksum of every file. It is written last, so a folder without one is unfinished.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.kernels.cpu.build import KernelBuildError
from headrace.kernels.cpu.library import ISA_VARIABLE
from headrace.runner.buckets import Bucket
from headrace.runner.packages import Facts, PackageRefused, compare, package_facts, platform_name, source_hash
from headrace.runner.step_module import StepShape

logger = logging.getLogger("headrace.compile")

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """A folder whose manifest could be read; its files are checked when they are asked for."""

    folder: Path
    facts: Facts
    shape: StepShape
    files: dict[Bucket, tuple[str, str]]  # name, sha256
    isa: str
    libraries: dict[str, tuple[str, str]]  # "operators" and "kernels": name, sha256

    def package(self, bucket: Bucket, wanted: Facts) -> bytes:
        """The package of one bucket for a service with these facts. Raises `PackageRefused`."""
        compare(package_facts(self.facts, bucket), package_facts(wanted, bucket))
        return self._checked(*self.files[bucket])

    def kernels(self) -> cpu.CpuKernels:
        """The libraries, whole. Raises `PackageRefused`."""
        wanted = {"platform": platform_name(), "kernels": source_hash()}
        compare(self.facts, wanted)
        for library in self.libraries.values():
            self._checked(*library)
        operators, kernels = (self.folder / self.libraries[name][0] for name in ("operators", "kernels"))
        return cpu.CpuKernels(isa=self.isa, ops_library=operators, kernel_library=kernels)

    def _checked(self, name: str, digest: str) -> bytes:
        if Path(name).name != name:
            raise PackageRefused(f"its manifest names {name!r}, which is no file of the folder")
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise PackageRefused(f"{name} can't be read: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise PackageRefused(f"{name} is torn: its checksum is not the manifest's")
        return data


def read_artifacts(folder: str) -> Artifacts:
    """Raises `PackageRefused` where there is no manifest or one that isn't ours."""
    path = Path(folder).expanduser()
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return Artifacts(
            folder=path,
            facts={str(name): str(value) for name, value in manifest["facts"].items()},
            shape=StepShape(
                static_length=int(manifest["shape"]["static_length"]),
                block_size=int(manifest["shape"]["block_size"]),
                kv_dtype=str(manifest["shape"]["kv_dtype"]),
            ),
            files={_bucket(entry): _file(entry) for entry in manifest["packages"]},
            isa=str(manifest["instruction_set"]),
            libraries={name: _file(manifest["libraries"][name]) for name in ("operators", "kernels")},
        )
    except FileNotFoundError as error:
        raise PackageRefused(f"there is no {path / MANIFEST}: write one with `headrace compile`") from error
    except OSError as error:
        raise PackageRefused(f"{path / MANIFEST} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PackageRefused(f"{path / MANIFEST} is torn") from error


def write_artifacts(folder: Path, facts: Facts, shape: StepShape, packages: Mapping[Bucket, bytes], kernels: cpu.CpuKernels) -> None:
    """Raises `ConfigError` where the folder can't be written."""
    libraries = {"operators": kernels.ops_library, "kernels": kernels.kernel_library}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        entries = []
        for bucket, body in packages.items():
            (folder / f"{bucket.name}.pt2").write_bytes(body)
            entries.append({**asdict(bucket), "file": f"{bucket.name}.pt2", "sha256": hashlib.sha256(body).hexdigest()})
        written = {}
        for name, library in libraries.items():
            data = library.read_bytes()
            (folder / library.name).write_bytes(data)
            written[name] = {"file": library.name, "sha256": hashlib.sha256(data).hexdigest()}
        manifest: dict[str, Any] = {
            "instruction_set": kernels.isa,
            "shape": asdict(shape),
            "facts": facts,
            "packages": entries,
            "libraries": written,
        }
        unfinished = folder / f"{MANIFEST}.tmp"
        unfinished.write_text(json.dumps(manifest, indent=1) + "\n")
        os.replace(unfinished, folder / MANIFEST)
    except OSError as error:
        raise ConfigError(f"--output {folder} can't be written: {error}.") from error


def lend_kernels(folder: str) -> Artifacts | None:
    """Reads the artifacts and loads their kernels, so that none need be compiled here. What is refused is logged, and None is returned."""
    wanted = os.environ.get(ISA_VARIABLE) or ""
    try:
        artifacts = read_artifacts(folder)
        if wanted not in ("", artifacts.isa):
            raise PackageRefused(f"its instruction set is {artifacts.isa}, and {ISA_VARIABLE} asks for {wanted}")
        cpu.use_libraries(artifacts.kernels())
    except (PackageRefused, KernelBuildError, ConfigError) as error:
        logger.warning("--artifacts %s is refused: %s", folder, error)
        return None
    return artifacts


def _file(entry: Mapping[str, Any]) -> tuple[str, str]:
    return str(entry["file"]), str(entry["sha256"])


def _bucket(entry: Mapping[str, Any]) -> Bucket:
    kind = entry["kind"]
    if kind not in ("decode", "mixed"):
        raise ValueError(f"no such kind of bucket: {kind}")
    return Bucket(kind=kind, num_tokens=int(entry["num_tokens"]), num_rows=int(entry["num_rows"]))
