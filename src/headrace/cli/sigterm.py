"""SIGTERM as an exception, for verbs that leave something behind where they are ended on the spot."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """The first SIGTERM ends the block as an exception does (`SystemExit`), so that it puts away what it has; further ones wait for that."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are for that one
        return

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
