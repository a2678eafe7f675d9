"""What a key's holder is called where keys must not show up: in the engine, in logs, in metrics. No web framework here: a start is waiting."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from headrace.config import ApiKey


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def tenant_of(key_digest: bytes) -> str:
    return key_digest.hex()[:16]


def tenant_weights(keys: Iterable[ApiKey]) -> tuple[tuple[str, float], ...]:
    """The weights of tenants that are not 1, as the engine takes them."""
    return tuple((tenant_of(digest(key.key.encode())), float(key.weight)) for key in keys if key.weight != 1)
