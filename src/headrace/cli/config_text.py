"""Settings as a config file that `headrace serve --config` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from headrace.cli import values
from headrace.cli.options import SERVE_GROUPS, Option
from headrace.config import SpeculativeConfig


def config_text(settings: Mapping[str, Any], *, head: str = "") -> str:
    """`settings`: by flag, as `settings.merge` gives them. `head`: comment lines before them."""
    options = {option.flag: option for _, group in SERVE_GROUPS for option in group}
    plain = {flag: _plain(options.get(flag), value) for flag, value in settings.items()}
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + yaml.safe_dump(plain, sort_keys=False, default_flow_style=False)


def _plain(option: Option | None, value: Any) -> Any:
    if isinstance(value, SpeculativeConfig):
        return asdict(value)
    if option is not None and option.read is values.size_in_gib:
        return f"{value}B"  # a number alone would be in GiB
    return list(value) if isinstance(value, tuple) else value
