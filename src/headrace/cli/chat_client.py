"""A small client of `/v1/chat/completions`, standard library only: what `headrace chat` talks with."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

from headrace.cli.server_address import ServerAddress, error_text
from headrace.errors import StartError

Message = dict[str, str]


class ChatError(Exception):
    """The server refused a turn or broke off; the conversation can go on."""


class ChatClient:
    """Talks to one server. `url` is where it listens, with or without /v1."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        self._address = ServerAddress(url)
        self.url = url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout = timeout

    def status(self, path: str) -> int:
        """The HTTP status of a GET; raises `OSError` where nobody listens."""
        connection = self._address.connect(5)
        try:
            connection.request("GET", self._address.prefix + path, headers=self._headers)
            return connection.getresponse().status
        finally:
            connection.close()

    def model(self) -> str:
        """The first model that the server offers. Raises `StartError` where there is none to talk to."""
        connection = self._address.connect(30)
        try:
            connection.request("GET", f"{self._address.prefix}/v1/models", headers=self._headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise StartError(f"{self.url} answers {response.status}: {error_text(body)}")
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise StartError(f"No server answers at {self.url} ({error}). Start one with `headrace serve`, or leave out --url.") from error
        except (ValueError, LookupError, TypeError) as error:
            raise StartError(f"{self.url} is not an OpenAI-compatible server: its /v1/models cannot be read.") from error
        finally:
            connection.close()

    def stream(self, messages: list[Message], *, model: str, options: dict[str, Any]) -> Iterator[str]:
        """The answer as it comes. Leaving the loop early closes the connection, and the server stops generating."""
        body = json.dumps({"model": model, "messages": messages, "stream": True, **options})
        connection = self._address.connect(self._timeout)
        try:
            connection.request("POST", f"{self._address.prefix}/v1/chat/completions", body=body, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(f"{response.status}: {error_text(response.read())}")
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection broke: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The texts in a server-sent event stream, up to [DONE]."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(error_text(data))
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise ChatError("the answer broke off before its end")
