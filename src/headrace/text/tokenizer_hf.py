"""A tokenizer from a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ModelLoadError
from headrace.text.tokenizer_spec import TokenizerSpec

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_directory(directory: Path) -> TokenizerSpec:
    """Read tokenizer.json and, where they exist, tokenizer_config.json, special_tokens_map.json, chat_template.*, generation_config.json
    and config.json. Raises `ModelLoadError`, which names the file, for a missing or wrong one and for special ids beyond the vocabulary.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing. Save the tokenizer with transformers' save_pretrained into {directory}.")
    definition = _read_json(path)
    model = definition.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise ModelLoadError(f"{path} has no model with a vocabulary.")
    definition["added_tokens"] = definition.get("added_tokens") or []
    settings = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    ids = dict(model["vocab"]) if isinstance(model["vocab"], dict) else {text: index for index, (text, _) in enumerate(model["vocab"])}
    ids |= {token["content"]: token["id"] for token in definition["added_tokens"]}
    named = {name: text for name in _NAMED if (text := _token_text(settings.get(name))) is not None}
    _add_named(definition, ids, {name: named[name] for name in ("bos_token", "eos_token") if name in named}, path)

    model_config = _read_json(directory / "config.json")
    generation_config = _read_json(directory / "generation_config.json")
    num_ids = max(1 + max(ids.values(), default=-1), *(section.get("vocab_size") or 0 for section in _sections(model_config)))
    stops = set()
    for name, config in (("config.json", model_config), ("generation_config.json", generation_config)):
        for section in _sections(config):
            stops |= {_checked_id(value, num_ids, directory / name) for value in _as_list(section.get("eos_token_id"))}
    eos = ids.get(named.get("eos_token", ""))
    if eos is not None:
        stops.add(eos)
    return TokenizerSpec(
        source=str(path),
        definition=definition,
        bos_token_id=ids.get(named.get("bos_token", "")),
        eos_token_id=eos,
        add_bos=settings.get("add_bos_token"),
        add_eos=settings.get("add_eos_token"),
        stop_token_ids=frozenset(stops),
        chat_template=_chat_template(directory, settings),
        named_tokens={name: text for name, text in named.items() if text in ids},
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}). Fetch the file again.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.")
    return value


def _token_text(value: Any) -> str | None:
    """A named token is its text or, in older files, an object with its text under `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _add_named(definition: dict[str, Any], ids: dict[str, int], named: dict[str, str], path: Path) -> None:
    """Start and end tokens are control tokens even where the file lists them as ordinary ones."""
    listed = {token["content"]: token for token in definition["added_tokens"]}
    for name, text in named.items():
        if text not in ids:
            raise ModelLoadError(f"{path}: {name} {text!r} is not in the vocabulary.")
        if text in listed:
            listed[text]["special"] = True
            continue
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        listed[text] = {"id": ids[text], "content": text, "special": True, **plain}
        definition["added_tokens"].append(listed[text])


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config and the part about text in a config of several modalities."""
    yield config
    if isinstance(config.get("text_config"), dict):
        yield config["text_config"]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _checked_id(value: Any, num_ids: int, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_ids:
        raise ModelLoadError(f"{path}: eos_token_id {value!r} is beyond the vocabulary of {num_ids} tokens.")
    return value


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """The file chat_template.jinja wins over chat_template.json, that over tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(directory / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        return by_name.get("default") or next(iter(by_name.values()), None)
    return template
