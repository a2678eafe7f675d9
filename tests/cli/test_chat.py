"""Chat against a small scripted server on the loopback address."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.chat import Conversation, talk
from headrace.cli.chat_client import ChatClient, ChatError
from headrace.cli.local_server import local_server
from headrace.cli.main import main
from headrace.errors import StartError

KEY = "sk-test"


class Scripted(BaseHTTPRequestHandler):
    """Answers each chat with what the last message asks for."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._send(401, {"error": {"message": "no such key"}})
        else:
            self._send(200, {"data": [{"id": "scripted"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)  # type: ignore[attr-defined]
        wish = body["messages"][-1]["content"]
        if wish == "refuse":
            self._send(400, {"error": {"message": "too long", "param": "messages"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        self.wfile.write(b": a comment\n\n")
        if wish != "silence":
            for piece in ("Grüß ", "dich"):
                self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        if wish == "fail":
            self._event({"error": {"message": "the engine died"}})
        elif wish != "break":
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: object) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())

    def _send(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(server: ThreadingHTTPServer) -> ChatClient:
    return ChatClient(f"http://127.0.0.1:{server.server_port}", api_key=KEY)


@pytest.fixture
def conversation(client: ChatClient) -> Conversation:
    return Conversation(client, model="scripted", options={"temperature": 0.0}, system="Be brief.", out=io.StringIO())


def written(conversation: Conversation) -> str:
    out = conversation._out
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_a_turn(conversation: Conversation, server: ThreadingHTTPServer) -> None:
    conversation.say("hello")
    assert written(conversation) == "Grüß dich\n"
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[-1]["content"] == "Grüß dich"
    assert server.asked == [  # type: ignore[attr-defined]
        {
            "model": "scripted",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
            "stream": True,
            "temperature": 0.0,
        }
    ]


@pytest.mark.parametrize(("wish", "said"), [("refuse", "[400: too long]"), ("silence", "")])
def test_a_turn_without_an_answer_leaves_no_trace(conversation: Conversation, wish: str, said: str) -> None:
    conversation.say(wish)
    assert written(conversation) == f"{said}\n"
    assert [message["role"] for message in conversation.messages] == ["system"]


@pytest.mark.parametrize(("wish", "reason"), [("fail", "the engine died"), ("break", "broke off")])
def test_a_broken_answer_is_kept_and_said(conversation: Conversation, wish: str, reason: str) -> None:
    conversation.say(wish)
    assert reason in written(conversation)
    assert conversation.messages[-1] == {"role": "assistant", "content": "Grüß dich"}


def test_interrupt_stops_the_answer_only(conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    def stream(*_: object, **__: object) -> Iterator[str]:
        try:
            yield "half"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    monkeypatch.setattr(conversation._client, "stream", stream)
    conversation.say("hello")
    assert written(conversation) == "half [stopped]\n"
    assert conversation.messages[-1]["content"] == "half"
    assert closed == [True]


def test_commands(conversation: Conversation) -> None:
    conversation.say("hello")
    assert conversation.command("/clear")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.command("/system Talk like a miller.")
    assert conversation.messages == [{"role": "system", "content": "Talk like a miller."}]
    assert conversation.command("/system")
    assert conversation.messages == []
    assert conversation.command("/help")
    assert conversation.command("/polish")
    assert "no command /polish" in written(conversation)
    assert not conversation.command("/exit")


def reader(*lines: str | type[BaseException]) -> Callable[[str], str]:
    rest = iter(lines)

    def read(prompt: str) -> str:
        line = next(rest)
        if not isinstance(line, str):
            raise line
        return line

    return read


@pytest.mark.parametrize("end", ["/exit", EOFError])
def test_talk(conversation: Conversation, end: str | type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    talk(conversation, prompt="", read=reader(KeyboardInterrupt, "  ", "hello", end))
    assert len(conversation.messages) == 3
    assert "/exit" in capsys.readouterr().out


def test_client_names_the_trouble(server: ThreadingHTTPServer, client: ChatClient) -> None:
    assert client.model() == "scripted"
    assert ChatClient(client.url + "/v1/", api_key=KEY).model() == "scripted"
    with pytest.raises(StartError, match="401: no such key"):
        ChatClient(client.url).model()
    with pytest.raises(StartError, match="not a URL"):
        ChatClient("ftp://x")
    server.shutdown()
    server.server_close()
    with pytest.raises(StartError, match="headrace serve"):
        client.model()
    with pytest.raises(ChatError, match="connection broke"):
        list(client.stream([], model="x", options={}))


def test_the_verb_with_a_url(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/exit\n"))
    arguments = ["--url", f"http://127.0.0.1:{server.server_port}", "--api-key", KEY, "--max-tokens", "8", "--seed", "1"]
    assert main(["chat", *arguments]) == 0
    assert capsys.readouterr().out == "Grüß dich\n"
    asked = server.asked[0]  # type: ignore[attr-defined]
    assert (asked["max_tokens"], asked["seed"]) == (8, 1)
    assert "temperature" not in asked


def test_the_verb_without_a_url_starts_a_server(
    client: ChatClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    started: list[Path] = []

    @contextlib.contextmanager
    def fake_server(model: Path) -> Iterator[ChatClient]:
        started.append(model)
        yield client

    monkeypatch.setattr("headrace.cli.local_server.local_server", fake_server)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", str(tmp_path)]) == 0
    assert started == [tmp_path]
    assert capsys.readouterr().out == "Grüß dich\n"


def test_a_local_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="There is no model at"), local_server(tmp_path / "none.gguf"):
        pytest.fail("it cannot start")
