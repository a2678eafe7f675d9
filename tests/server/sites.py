"""A world behind a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import uvicorn

from headrace.server.protocol import BoundedHttpProtocol
from headrace.server.serve import HttpServer, listen
from tests.patience import LIMIT_S
from tests.patience import eventually as until
from tests.server.fakes import World


class Site:
    """A world behind a port."""

    def __init__(self, world: World, port: int) -> None:
        self.world = world
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    @staticmethod
    def wire(path: str, body: object) -> bytes:
        data = json.dumps(body).encode()
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(data)
        received = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        return received


@contextlib.asynccontextmanager
async def opened(world: World) -> AsyncIterator[Site]:
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        world.app, http=BoundedHttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield Site(world, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving
