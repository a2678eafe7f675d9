"""From the name that a person gives to the files on this machine: the default model, a path, or a name on the hub."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ModelLoadError
from headrace.models import hub, packaged_model
from headrace.models.packaged_model import SMOLLM2_135M

DEFAULT_MODEL = SMOLLM2_135M.name
PACKAGED_MODELS = {SMOLLM2_135M.name.lower(): SMOLLM2_135M}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """One line of `headrace models list`."""

    name: str  # what to give to `headrace serve`
    path: Path | None  # None: not fetched yet
    size: int  # bytes on disk, or to fetch
    source: str  # "package" or "hub"


def cache_root() -> Path:
    """`$HEADRACE_HOME`, or `~/.cache/headrace`."""
    home = os.environ.get("HEADRACE_HOME")
    return Path(home).expanduser().absolute() if home else Path.home() / ".cache" / "headrace"


def resolve_model(name: str | None, *, progress: bool = True) -> Path:
    """The directory or GGUF file of a model, fetched if need be.

    `None` means the default model. A name is a path on this machine, else a packaged model, else a name on the hub (owner/model,
    or owner/model/FILE.gguf). Raises `ModelLoadError`, which names what was asked for and the next step.
    """
    path = Path(name).expanduser() if name else None
    if path is not None and path.exists():
        return _checked_path(path.absolute())
    packaged = PACKAGED_MODELS.get((name or DEFAULT_MODEL).lower())
    if packaged is not None:
        return packaged_model.ensure(packaged, _models_folder(), progress=progress)
    if name is None or not hub.is_hub_name(name):
        raise ModelLoadError(
            f"There is no model at {name}. Give a GGUF file, a Hugging Face directory, a hub name (owner/model), "
            f"or nothing for {DEFAULT_MODEL}; `headrace models list` shows what is here."
        )
    return hub.resolve(name, progress=progress)


def list_models() -> list[StoredModel]:
    """The models that are known by name: those that come in a package, and those in the hub's cache."""
    models = []
    for packaged in PACKAGED_MODELS.values():
        path = _models_folder() / packaged.file_name
        models.append(StoredModel(name=packaged.name, path=path if path.exists() else None, size=packaged.size, source="package"))
    models.extend(StoredModel(name=model.name, path=model.path, size=model.size, source="hub") for model in hub.cached_models())
    return models


def show(path: Path) -> dict[str, object]:
    """What a model says of itself, from its metadata alone; raises `ModelLoadError` for a file that cannot be read."""
    facts: dict[str, object] = {"path": str(path), "size": sum(file.stat().st_size for file in _weight_files(path))}
    if path.is_file():
        from headrace.models.gguf import GGUFFile

        file = GGUFFile(path)
        simple = {key: value for key, value in file.metadata.items() if isinstance(value, str | int | float | bool) and len(str(value)) <= 200}
        return facts | {"format": "GGUF", "tensors": len(file.tensors)} | dict(sorted(simple.items()))
    config = _read_json(path / "config.json")
    return facts | {"format": "Hugging Face", "weight files": len(_weight_files(path))} | config


def verify(path: Path) -> list[str]:
    """Check every weight file; one line a file says how. Raises `ModelLoadError` that names the first torn one.

    The default model is hashed against its pinned checksum, files of the hub's cache against the hash that names their blob.
    Others have no known checksum: their structure is checked.
    """
    if path.is_dir() and (lacking := hub.missing_files(path)):
        raise ModelLoadError(f"{path} has no {', '.join(lacking)}. Fetch or copy the model again.")
    return [f"{file.name}: {_verify_file(file)}" for file in _weight_files(path)]


def _models_folder() -> Path:
    return cache_root() / "models"


def _checked_path(path: Path) -> Path:
    """A path that can be a model, by its looks."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(path.glob("*.gguf"))
            hint = f" It holds {files[0].name}: name that file." if files else ""
            raise ModelLoadError(f"{path} is not a Hugging Face model directory: it has no config.json.{hint}")
        return path
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file (it starts with {magic!r}). Give a GGUF file or a Hugging Face directory.")
    return path


def _weight_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}. Fetch or copy the model again.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object. Fetch or copy the model again.")
    return value


def _verify_file(path: Path) -> str:
    for packaged in PACKAGED_MODELS.values():
        if path == _models_folder() / packaged.file_name:
            packaged_model.check(packaged, path)
            return "checksum is the pinned one"
    blob = path.resolve().name
    if path.is_symlink() and len(blob) == 64:  # the hub's cache names a large file by its SHA-256
        if packaged_model.file_sha256(path) != blob:
            raise ModelLoadError(f"{path} is torn: its SHA-256 is not {blob}. Delete {path.resolve()} and fetch the model again.")
        return "checksum is the hub's"
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                return f"{len(list(file.keys()))} tensors, structure is whole (no checksum known)"
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is torn: {error}. Fetch or copy the model again.") from error
    from headrace.models.gguf import GGUFFile

    return f"{len(GGUFFile(path).tensors)} tensors, structure is whole (no checksum known)"
