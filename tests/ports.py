"""Ports for servers that tests start as processes of their own."""

from __future__ import annotations

import secrets
import socket

LOWEST, HIGHEST = 10_000, 30_000  # below what systems give to connections: none of those takes the port before the server does


def free_port() -> int:
    """A port that nobody listens on now."""
    while True:
        port = LOWEST + secrets.randbelow(HIGHEST - LOWEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
