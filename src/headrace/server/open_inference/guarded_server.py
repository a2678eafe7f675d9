"""A gRPC server that outlives calls of methods whose name is no UTF-8.

grpcio's asyncio server decodes the name of each method that is not registered in its main loop, so one byte from a stranger ends the loop
and with it the port and all its calls. Here the calls of registered methods go their usual way, and all others are refused without a look
at their name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

NOTHING = cygrpc._MethodResolver([], {}) if hasattr(cygrpc, "_MethodResolver") else None


def new_server(*, options: Sequence[tuple[str, Any]], maximum_concurrent_rpcs: int) -> grpc.aio.Server:
    """Every method must be registered (`add_registered_method_handlers`)."""
    if NOTHING is None:  # versions without it decode the name where it harms nobody else
        return grpc.aio.server(options=options, maximum_concurrent_rpcs=maximum_concurrent_rpcs)
    return _GuardedServer(tuple(options), maximum_concurrent_rpcs)


class _GuardedServer(_server.Server):
    def __init__(self, options: tuple[tuple[str, Any], ...], maximum_concurrent_rpcs: int) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _GuardedCore(self._loop, None, (), (), options, maximum_concurrent_rpcs)


class _GuardedCore(cygrpc.AioServer):
    def __init__(self, loop: asyncio.AbstractEventLoop, *arguments: Any) -> None:
        super().__init__(loop, *arguments)
        self.loop = loop
        self.refusals: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """The next call of a registered method. For None, of all others: something that ends with the server."""
        return self.loop.create_task(self._refuse_others()) if method is None else super()._make_request_call_future(method)

    async def _refuse_others(self) -> None:
        while True:
            call = await self._request_call()  # raises when the server ends
            answer = cygrpc._handle_rpc("", NOTHING, (), call, self.loop, False)  # no method has this name: UNIMPLEMENTED
            task = self.loop.create_task(cygrpc._schedule_rpc_coro(answer, call, self.loop, ""))
            self.refusals.add(task)
            task.add_done_callback(self.refusals.discard)
