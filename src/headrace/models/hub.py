"""Models of the Hugging Face hub: the hub's own cache first, then a download of only the files that Headrace reads."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ModelLoadError

# Weights as safetensors only: pickled weights (.bin, .pt) could run code. Files in folders are copies in other formats.
ALLOW = ["*.safetensors", "*.json", "*.jinja"]
IGNORE = ["*/*", "consolidated*.safetensors"]

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.gguf$)[\w.-]+")
GGUF_IN_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/(.+\.gguf)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    name: str
    path: Path
    size: int  # bytes


def is_hub_name(name: str) -> bool:
    """Whether `name` reads as owner/model or owner/model/FILE.gguf."""
    return bool(REPOSITORY.fullmatch(name) or GGUF_IN_REPOSITORY.fullmatch(name))


def resolve(name: str, *, progress: bool) -> Path:
    """A snapshot directory, or the GGUF file for owner/model/FILE.gguf. Raises `ModelLoadError` that says the next step."""
    match = GGUF_IN_REPOSITORY.fullmatch(name)
    cached = _cached_file(match[1], match[2]) if match else _cached_snapshot(name)
    if cached is not None:
        return cached
    return _download(name, match, progress=progress)


def missing_files(snapshot: Path) -> list[str]:
    """What a snapshot lacks before it can be served; empty when it is whole."""
    if not (snapshot / "config.json").is_file():
        return ["config.json"]
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(snapshot.glob("*.safetensors")) else ["model.safetensors"]
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{index} is torn: {error!r}. Delete it and fetch the model again.") from error
    return sorted(name for name in shards if not (snapshot / name).is_file())


def cached_models() -> list[HubModel]:
    """Every model in the hub's cache that can be served."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    found = []
    for repository in cache.repos:
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            if not missing_files(revision.snapshot_path):
                found.append(HubModel(name=repository.repo_id, path=revision.snapshot_path, size=revision.size_on_disk))
            for file in sorted(revision.files, key=lambda file: file.file_name):
                if file.file_name.endswith(".gguf"):
                    name = f"{repository.repo_id}/{file.file_path.relative_to(revision.snapshot_path)}"
                    found.append(HubModel(name=name, path=file.file_path, size=file.size_on_disk))
    return sorted(found, key=lambda model: model.name)


def _cached_snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(name, allow_patterns=ALLOW, ignore_patterns=IGNORE, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return None if missing_files(snapshot) else snapshot


def _cached_file(repository: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, file)
    return Path(found) if isinstance(found, str) else None


def _download(name: str, match: re.Match[str] | None, *, progress: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    advice = "name a model you have: `headrace serve PATH` with a GGUF file or a Hugging Face directory"
    try:
        with _progress_bars(progress):
            if match:
                return Path(hf_hub_download(match[1], match[2]))
            snapshot = Path(snapshot_download(name, allow_patterns=ALLOW, ignore_patterns=IGNORE))
    except GatedRepoError as error:
        raise ModelLoadError(f"{name} is gated: accept its terms on the hub, then set HF_TOKEN to your token.") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"There is no file or directory {name} here, and the hub has no such model, or you may not see it. "
            f"Check the spelling, set HF_TOKEN if it is private, or {advice}."
        ) from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(name, error.__cause__ or error, advice) from error
    except EntryNotFoundError as error:
        raise ModelLoadError(f"{name} is not on the hub: the repository has no such file. Check the spelling.") from error
    except Exception as error:  # the hub's client lets errors of its HTTP library through, and which library that is has changed
        raise _unreachable(name, error, advice) from error
    lacking = missing_files(snapshot)
    if lacking:
        raise ModelLoadError(
            f"{name} on the hub has no {', '.join(lacking)}. Headrace reads safetensors and GGUF, never pickled weights: "
            "choose a repository with safetensors, or a GGUF file as owner/model/FILE.gguf."
        )
    return snapshot


def _unreachable(name: str, error: BaseException, advice: str) -> ModelLoadError:
    state = "HF_HUB_OFFLINE is set and the hub's cache does not hold it" if _is_offline() else f"the hub cannot be reached ({_first_line(error)})"
    return ModelLoadError(f"There is no file or directory {name} here, and {state}. Check the network, set HF_ENDPOINT to a mirror, or {advice}.")


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
