"""W3C trace context: `traceparent` in, and one with a span of ours out, so that the caller's trace and our log name each other."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16, of this request in this server
    parent_id: str  # 16, of the caller; empty where the trace begins here
    sampled: bool

    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def continued(values: list[str]) -> TraceContext | None:
    """The context of a request with these `traceparent` headers. None where there is none, or none that the standard takes."""
    match = _FORM.fullmatch(values[0].strip(" \t")) if len(values) == 1 else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceContext(trace_id=trace_id, span_id=secrets.token_hex(8), parent_id=parent_id, sampled=bool(int(flags, 16) & 1))
