"""Responses that are kept for a later request: in memory, the least recently used go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20  # of JSON, all responses together

Key = tuple[str, str]  # (tenant, response id): nobody sees another key's responses


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """Kept as JSON: that is small, its size is known, and nobody can change it."""

    response_json: bytes
    input_json: bytes  # every item that the model was given, those of earlier responses first

    @property
    def size(self) -> int:
        return len(self.response_json) + len(self.input_json)

    @property
    def response(self) -> dict[str, Any]:
        return msgspec.json.decode(self.response_json, type=dict[str, Any])

    @property
    def input_items(self) -> list[dict[str, Any]]:
        return msgspec.json.decode(self.input_json, type=list[dict[str, Any]])


class ResponseStore:
    """Thread-safe. `num_bytes` is what all entries take."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, StoredResponse] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tenant: str, response: dict[str, Any], input_items: list[dict[str, Any]]) -> None:
        """Keep a response, or a newer state of it. One that is larger than all of the room is not kept."""
        entry = StoredResponse(response_json=msgspec.json.encode(response), input_json=msgspec.json.encode(input_items))
        key = (tenant, response["id"])
        with self._lock:
            self._drop(key)
            if entry.size > self._max_bytes:
                return
            self._entries[key] = entry
            self.num_bytes += entry.size
            while len(self._entries) > self._max_responses or self.num_bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            entry = self._entries.get((tenant, response_id))
            if entry is not None:
                self._entries.move_to_end((tenant, response_id))
            return entry

    def delete(self, tenant: str, response_id: str) -> bool:
        """False if there is none."""
        with self._lock:
            return self._drop((tenant, response_id))

    def check(self) -> None:
        """All derived facts, computed again."""
        assert self.num_bytes == sum(entry.size for entry in self._entries.values())
        assert len(self._entries) <= self._max_responses
        assert self.num_bytes <= self._max_bytes

    def _drop(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.num_bytes -= entry.size
        return True
