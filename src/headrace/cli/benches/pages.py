"""Where reports go."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError


def write_page(path: Path, page: str) -> None:
    """Raises `ConfigError` where the file can't be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: cannot write {path}: {error.strerror}.") from error
    print(f"written: {path}")
