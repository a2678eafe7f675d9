"""`--api-keys-file`: keys with names and limits. No message holds a key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from headrace.config import ApiKey
from headrace.errors import ConfigError


def api_keys_file(text: str) -> tuple[ApiKey, ...]:
    """The keys of a YAML file, which is a list of them. Raises `ValueError`."""
    import yaml  # a server without such a file does not hold it

    try:
        entries = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file cannot be read: {error}") from None
    except yaml.YAMLError:
        raise ValueError("the file is not YAML") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError("the file must hold a list of keys, such as `- {name: team-a, key: SECRET, tokens_per_minute: 100000}`")
    keys = tuple(_api_key(number, entry) for number, entry in enumerate(entries, start=1))
    for what in ("name", "key"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ValueError(f"two entries have the same {what}")
    return keys


def _api_key(number: int, entry: object) -> ApiKey:
    names = [field.name for field in fields(ApiKey)]
    if not isinstance(entry, dict) or not set(entry) <= set(names) or not {"name", "key"} <= set(entry):
        raise ValueError(f"entry {number}: use name and key, and any of {', '.join(names[2:])}")
    try:
        return ApiKey(**entry)
    except ConfigError as error:
        raise ValueError(f"entry {number}: {error}") from None
