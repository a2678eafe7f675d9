"""How tests wait for what has to come: long enough for a machine that stands still for some seconds, short enough to end a hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 60.0


def until(condition: Callable[[], object], seconds: float = LIMIT_S) -> None:
    """Returns when the condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so within {seconds:g} s"
        time.sleep(0.005)


async def eventually(condition: Callable[[], object], seconds: float = LIMIT_S) -> None:
    """`until`, while the event loop goes on."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so within {seconds:g} s"
        await asyncio.sleep(0.005)
