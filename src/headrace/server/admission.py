"""How many requests the HTTP process holds at once. One more is told to come back, at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from headrace.errors import QueueFull


class Admission:
    """Permits for requests that generate: running, queued in the engine, or being parsed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0
        self.idle = asyncio.Event()  # set while no permit is held
        self.idle.set()

    @contextlib.contextmanager
    def permit(self) -> Iterator[None]:
        """Holds a permit; raises `QueueFull` if there is none."""
        if self.active >= self.limit:
            raise QueueFull(f"The server is busy with {self.active} requests, which is as many as it holds; try again in a moment.")
        self.active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if self.active == 0:
                self.idle.set()
