"""Bytes that a hostile or broken client may send to the HTTP port, and what may come back. Used by fuzz.py."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/detokenize"),
    *("/v1/files", "/v1/batches", "/v1/cache/explain", "/health", "/v1/models", "/metrics", "/openapi.json", "/", "/nope"),
)
BODIES: tuple[dict[str, object], ...] = (
    {"prompt": "hello", "max_tokens": 3},
    {"prompt": "hello", "max_tokens": 8, "stream": True, "logprobs": 2},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": {"type": "json_object"}},
    {"input": "x", "max_output_tokens": 3},
    {"tokens": [1, 2]},
)
HEADERS = (
    *(b"Content-Length: 99999999999999999999", b"Content-Length: -5", b"Content-Length: +7", b"Content-Length: 3, 4", b"Content-Length: 0x10"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: \x0bchunked", b"Expect: 100-continue"),
    *(b"Content-Encoding: gzip", b"Connection: upgrade\r\nUpgrade: websocket", b"Connection: close", b"Connection: upgrade\r\nUpgrade: h2c"),
    *(b"Content-Type: multipart/form-data; boundary=x", b"Authorization: Bearer \xff", b"traceparent: 00-\x00", b"Timeout: 1e999", b"X-A: a\r\n b"),
    *(
        b"Host: a\r\nHost: b",
        b": empty",
        b"no colon",
        b"X-Request-Id: \xe4\xf6",
        b"Accept-Encoding: \x80",
        b"Range: bytes=0-",
        b"Cookie: " + b"a=b;" * 500,
    ),
)
PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b" ",
    b":",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"%00",
    b"{",
    b'"',
    b"\xff\xfe",
    b"-1",
    b"\xed\xa0\x80",
    b"%ff%fe",
    b"0\r\n\r\n",
)
CHUNK_SIZES = (b"-1", b"fffffffffffffffff", b"7fffffffffffffff", b"", b"zz", b"0x5", b"5;" + b"e" * 3000, b" 5", b"05", b"1" * 40)
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What one connection sends."""

    kind: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0  # seconds between the pieces
    half_close: bool = False  # the client says that nothing more will come, and goes on reading


def request(chance: random.Random, *, version: bytes = b"HTTP/1.1", header: bytes = b"", chunked: bool | None = None) -> bytes:
    """A valid request, but for the header that is put in."""
    body = json.dumps(chance.choice(BODIES)).encode()
    path = chance.choice(PATHS[:5] if chance.random() < 0.5 else PATHS).encode()
    head = b"%b %b %b\r\nHost: x\r\n" % (chance.choice((b"POST", b"POST", b"POST", b"GET", b"DELETE", b"PUT")), path, version)
    head += header + b"\r\n" if header else b""
    if chance.random() < 0.3 if chunked is None else chunked:
        cut = chance.randrange(1, len(body))
        return (
            head
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:cut], body[cut:]))
            + b"0\r\n\r\n"
        )
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def mutate(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                changed[at:at] = chance.choice(PIECES)
            case 2:
                del changed[at : at + chance.randint(1, 30)]
            case 3:
                changed[at:at] = changed[at : at + chance.randint(1, 60)]
            case 4 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def mutated(chance: random.Random) -> Attack:
    return Attack(kind="mutated", pieces=(mutate(chance, b"".join(request(chance) for _ in range(chance.randint(1, 3)))),))


def noise(chance: random.Random) -> Attack:
    return Attack(
        kind="noise", pieces=(chance.choice((HTTP2, TLS_HELLO, chance.randbytes(chance.randint(1, 4000)), b"\x00" * 5000, b"\r\n" * 2000)),)
    )


def truncated(chance: random.Random) -> Attack:
    data = request(chance)
    return Attack(kind="truncated", pieces=(data[: chance.randrange(1, len(data))],), half_close=chance.random() < 0.5)


def huge_head(chance: random.Random) -> Attack:
    size = chance.choice((8_000, 70_000, 400_000))
    header = chance.choice((b"X-Long: " + b"a" * size, b"\r\n".join(b"X-%d: a" % number for number in range(size // 10)), b"a" * size + b": x"))
    data = request(chance, header=header)
    if chance.random() < 0.3:
        data = b"GET /" + b"a" * size + b" HTTP/1.1\r\n\r\n"
    return Attack(kind="huge head", pieces=(data,))


def odd_header(chance: random.Random) -> Attack:
    return Attack(kind="odd header", pieces=(request(chance, header=chance.choice(HEADERS)),))


def bad_chunks(chance: random.Random) -> Attack:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % chance.choice(PATHS).encode()
    chunks = b"".join(
        b"%b\r\n%b%b" % (chance.choice((*CHUNK_SIZES, b"5")), b'{"a":'[: chance.randint(0, 5)], chance.choice((b"\r\n", b"\n", b"")))
        for _ in range(3)
    )
    return Attack(
        kind="bad chunks", pieces=(head + chunks + chance.choice((b"", b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n")),), half_close=chance.random() < 0.2
    )


def pipelined(chance: random.Random) -> Attack:
    data = b"".join(request(chance) for _ in range(chance.randint(4, 20)))
    return Attack(kind="pipelined", pieces=(data if chance.random() < 0.5 else mutate(chance, data),))


def http_1_0(chance: random.Random) -> Attack:
    version = chance.choice((b"HTTP/1.0", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/1.2", b"HTTP/2.0", b"http/1.1", b""))
    header = chance.choice((b"", b"Connection: keep-alive"))
    return Attack(kind="other version", pieces=(request(chance, version=version, header=header, chunked=False),))


def bad_text(chance: random.Random) -> Attack:
    bad = chance.choice((b"\xff\xfe", b"\xc3(", b"\xed\xa0\x80", b"\\ud800", b"\x00", b"\\u0000", b"\xf8\x88\x80\x80\x80"))
    body = b'{"prompt": "a%b", "max_tokens": 2, "stop": ["%b"], "user": "%b"}' % (bad, chance.choice((b"x", bad)), bad)
    path = chance.choice((b"/v1/completions", b"/v1/models/" + bad, b"/v1/files?after=" + bad, b"/v1/files/" + bad, b"/v1/completions?" + bad))
    return Attack(kind="bad text", pieces=(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body),))


def slow(chance: random.Random) -> Attack:
    """Some are slow enough to be turned away, some are not."""
    data = request(chance)
    size = chance.choice((1, 3, 40))
    return Attack(kind="slow", pieces=tuple(data[at : at + size] for at in range(0, len(data), size)), pause=chance.choice((0.01, 0.1, 0.5)))


def half_closed(chance: random.Random) -> Attack:
    return Attack(kind="half-closed", pieces=(b"".join(request(chance) for _ in range(chance.randint(1, 2))),), half_close=True)


def wrong_length(chance: random.Random) -> Attack:
    body = json.dumps(chance.choice(BODIES)).encode()
    size = max(0, len(body) + chance.choice((-9, -1, 1, 9, 5000)))
    return Attack(
        kind="wrong length", pieces=(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (chance.choice(PATHS).encode(), size) + body,)
    )


HTTP_ATTACKS: tuple[Callable[[random.Random], Attack], ...] = (
    *(mutated, mutated, mutated, noise, truncated, huge_head, odd_header, bad_chunks, pipelined, http_1_0, bad_text, slow, half_closed),
    wrong_length,
)

_HEAD = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r]*\r\n(?:[^\r]+\r\n)*\r\n")


def read_answers(data: bytes) -> tuple[list[int], bool]:
    """Status codes of the answers in what a server sent, and whether the last one is whole. Raises ValueError for what is no HTTP."""
    statuses: list[int] = []
    at = 0
    while at < len(data):
        head = _HEAD.match(data, at)
        if head is None:
            if not data[at:].startswith(b"HTTP/1."[: len(data) - at]) or b"\r\n\r\n" in data[at:]:
                raise ValueError(f"what the server sent is no HTTP: {data[at : at + 200]!r}")
            return statuses, False
        status, at = int(head[1]), head.end()
        if status < 200:
            if at == len(data):
                return statuses, False  # 100: the answer is still to come
            continue
        statuses.append(status)
        lowered = head[0].lower()
        if b"\r\ntransfer-encoding: chunked\r\n" in lowered:
            while (size := re.compile(rb"([0-9a-f]+)\r\n").match(data, at)) is not None:
                at = size.end() + int(size[1], 16) + 2
                if int(size[1], 16) == 0:
                    break
            if size is None or at > len(data):
                return statuses, False
        elif (length := re.search(rb"\r\ncontent-length: (\d+)\r\n", lowered)) is not None:
            at += int(length[1])
            if at > len(data):
                return statuses, False
        elif status not in (204, 304):
            return statuses, False  # to the end of the connection
    return statuses, bool(statuses)
