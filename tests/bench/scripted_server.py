"""A server whose delays are known: it streams tokens at fixed moments and notes when it really wrote them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ScriptedServer:
    first_s: float = 0.03
    gap_s: float = 0.01
    fault: str = ""  # status, cut, event, json, silence, usage: what goes wrong or is missing
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)  # by request: when each token was written
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self._answer(reader, writer)
        finally:
            self.at_once -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.paths.append(head.split()[1])
        if head.startswith("GET"):
            self._body(writer, 200, {"data": [{"id": "scripted"}]})
            return
        length = int(next(line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length")))
        body = json.loads(await reader.readexactly(length))
        self.asked.append(body)
        if self.fault == "status":
            self._body(writer, 429, {"error": {"message": "too many"}})
            return
        moments: list[float] = []
        self.written.append(moments)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chat = "chat" in self.paths[-1]
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        count = 0 if self.fault == "silence" else body["max_tokens"]
        for number in range(count):
            await asyncio.sleep(self.gap_s if number else self.first_s)
            choice = {"delta": {"content": "x "}} if chat else {"text": "x "}
            moments.append(time.monotonic())
            self._event(writer, {"choices": [choice]}, split=number % 2 == 1)
            if self.fault == "event":
                self._event(writer, {"error": {"message": "the engine died"}})
            if self.fault == "json":
                self._chunk(writer, b"data: {nonsense\n\n")
            if self.fault == "cut":
                return
        if self.fault != "usage":
            self._event(writer, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, value: object, *, split: bool = False) -> None:
        data = f"data: {json.dumps(value)}\r\n\r\n".encode()
        for part in (data[:9], data[9:]) if split else (data,):
            self._chunk(writer, part)

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _body(self, writer: asyncio.StreamWriter, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


@contextlib.contextmanager
def scripted_server(**fields: Any) -> Iterator[ScriptedServer]:
    """It runs in a thread of its own."""
    server = ScriptedServer(**fields)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(server.serve, "127.0.0.1", 0), loop).result(30)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_end(listening), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


async def _end(listening: asyncio.Server) -> None:
    listening.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
