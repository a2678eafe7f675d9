"""From flags and a config file to configs: flag > file > environment > default."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.cli import values
from headrace.cli.options import SCHEDULER_OPTIONS, SERVE_GROUPS, Option
from headrace.config import EngineConfig, ServerConfig, SpeculativeConfig
from headrace.errors import ConfigError

MODEL_KEY = "model"


def read_config_file(path: str) -> dict[str, Any]:
    """Values by the option's flag (and `model`), read as the flags are. Raises `ConfigError` that names file and key."""
    import yaml  # a server without such a file does not hold it

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold flags as keys, such as `max-num-seqs: 16`, not a {type(content).__name__}.")
    options = {name: option for _, group in SERVE_GROUPS for option in group for name in option.names}
    read: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name != MODEL_KEY and name not in options:
            near = difflib.get_close_matches(name, [MODEL_KEY, *options], n=1)
            raise ConfigError(f"--config: {path} has an unknown key {key}.{f' Did you mean {near[0]}?' if near else ''}")
        flag = MODEL_KEY if name == MODEL_KEY else options[name].flag
        if flag in read:
            raise ConfigError(f"--config: {path} gives {flag} twice.")
        if value is None:
            continue  # a key without a value means the default
        try:
            read[flag] = str(value) if name == MODEL_KEY else _read(options[name], value)
        except ValueError as error:
            raise ConfigError(f"--config: {path}: {key}: {value!r} is not right here: {error}") from error
    return read


def _read(option: Option, value: object) -> Any:
    if isinstance(value, list) and (option.many or option.read is values.texts):
        return tuple(str(item) for item in value)
    if isinstance(value, dict) and option.read is values.speculative_config:
        return SpeculativeConfig.parse(value)
    if isinstance(value, list | dict):
        raise ValueError("use one value")
    if isinstance(value, bool) and not option.is_switch:
        raise ValueError("true and false are for switches")
    text = str(value)
    if option.choices and text not in option.choices:
        raise ValueError(f"use one of {', '.join(option.choices)}")
    return (text,) if option.many else option.read(text)


def merge(flags: argparse.Namespace, file: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option that was set, by flag name: the command line wins over the file."""
    options = [option for _, group in SERVE_GROUPS for option in group]
    given = vars(flags)
    merged = dict(file)
    for option in options:
        name = option.flag.replace("-", "_")
        if name in given:
            merged[option.flag] = tuple(given[name]) if option.many else given[name]
    if "api-key" not in merged and (key := os.environ.get("HEADRACE_API_KEY")):
        merged["api-key"] = (key,)
    return merged


def engine_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `EngineConfig` that were set, but for the model."""
    fields = _fields(EngineConfig, settings)
    if "max_num_batched_tokens" not in fields and "max_num_seqs" in fields:
        # a step must hold one token of every running request; whoever asks for more of them need not know that
        default = next(option.default for option in SCHEDULER_OPTIONS if option.field == "max_num_batched_tokens")
        fields["max_num_batched_tokens"] = max(int(str(default)), fields["max_num_seqs"])
    return fields


def server_config(settings: Mapping[str, Any]) -> ServerConfig:
    """Raises `ConfigError` for values that do not go together."""
    config = ServerConfig(**_fields(ServerConfig, settings))
    if bool(config.ssl_certfile) != bool(config.ssl_keyfile):
        raise ConfigError("--ssl-certfile and --ssl-keyfile are needed together.")
    for flag, file in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        if file and not Path(file).is_file():
            raise ConfigError(f"{flag}: there is no file {file}.")
    if any(not key for key in config.api_keys):
        raise ConfigError("--api-key must not be empty.")
    if not {key.key for key in config.limited_keys}.isdisjoint(config.api_keys):
        raise ConfigError("--api-keys-file and --api-key have a key in common; give it once.")
    return config


def _fields(owner: type[EngineConfig] | type[ServerConfig], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {option.field: settings[option.flag] for _, group in SERVE_GROUPS for option in group if option.owner is owner and option.flag in settings}
