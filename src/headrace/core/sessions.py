"""Which prefixes belong to sessions whose lease runs: what is worth keeping when the engine ends, and how it comes back.

A block that is restored was computed by an earlier engine. It is taken, filled by the caller, made findable and given back, in this order,
before the first request comes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.core.prefix import PrefixNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What the latest turn of a session left behind."""

    session_id: str
    tenant: str
    salt: str | None
    lease_until: float  # monotonic seconds
    chain: tuple[PrefixNode, ...]  # its full blocks; some may have been evicted since

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for node in self.chain for token in node.token_ids)


class Sessions:
    """The sessions whose turns ended last. All of them together name at most `max_blocks` blocks."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def note(self, session: Session) -> None:
        """The session's latest turn has ended."""
        key = (session.tenant, session.session_id)
        self._drop(key)
        self._sessions[key] = session
        self._num_blocks += len(session.chain)
        while self._num_blocks > self._max_blocks:
            self._drop(next(iter(self._sessions)))

    def live(self, now: float) -> list[Session]:
        """Those whose lease runs at `now`, the latest first."""
        return [session for session in reversed(self._sessions.values()) if session.lease_until > now]

    def _drop(self, key: tuple[str, str]) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._num_blocks -= len(session.chain)

    def check(self) -> None:
        """Raise AssertionError where the count is wrong."""
        assert self._num_blocks == sum(len(session.chain) for session in self._sessions.values()) <= self._max_blocks
