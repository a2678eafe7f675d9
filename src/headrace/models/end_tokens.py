"""End tokens of a Hugging Face directory beyond config.json: those of generation_config.json and of the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ModelLoadError
from headrace.models.model_config import token_ids


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none. Raises ModelLoadError for anything else in it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not readable JSON ({error}). Fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, not {type(value).__name__}.")
    return value


def extra_end_tokens(directory: Path) -> set[int]:
    """Ids that end a turn by generation_config.json or by the tokenizer's eos_token."""
    generation = directory / "generation_config.json"
    ids = token_ids(read_json(generation).get("eos_token_id"), name="eos_token_id", where=str(generation))
    settings = read_json(directory / "tokenizer_config.json")
    token = settings.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        found = _token_id(token, settings, directory)
        if found is not None:
            ids.add(found)
    return ids


def _token_id(token: str, settings: dict[str, Any], directory: Path) -> int | None:
    """None where the directory has no tokenizer to ask. Raises ModelLoadError where it has one that doesn't know the token."""
    for key, entry in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and entry.get("content") == token:
            return int(key)
    path = directory / "tokenizer.json"
    tokenizer = read_json(path)
    if not tokenizer:
        return None
    for entry in tokenizer.get("added_tokens") or []:
        if entry.get("content") == token:
            return int(entry["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, dict) and token in vocab:
        return int(vocab[token])
    if isinstance(vocab, list):
        for index, entry in enumerate(vocab):
            if entry[0] == token:
                return index
    raise ModelLoadError(f"{path}: doesn't know the end token {token!r} that tokenizer_config.json names.")
