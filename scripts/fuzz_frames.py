"""HTTP/2 that a hostile or broken client may send to the gRPC port. Used by fuzz.py."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

from fuzz_bytes import TLS_HELLO, Attack, request

from headrace.server.open_inference import wire

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
METHODS = ("ModelInfer", "ModelInfer", "ModelStreamInfer", "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "Nope")


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0, length: int | None = None) -> bytes:
    return struct.pack(">I", len(payload) if length is None else length)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(**fields: bytes) -> bytes:
    """Literal fields that enter no table."""
    return b"".join(b"\x00" + _text(name.replace("_", "-").replace("--", ":").encode()) + _text(value) for name, value in fields.items())


def _text(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, size = len(value) - 127, bytearray([127])
    while rest >= 128:
        size.append(rest % 128 + 128)
        rest //= 128
    return bytes([*size, rest]) + value


def message(chance: random.Random, model: str) -> bytes:
    """A request for a few tokens."""
    made = wire.ModelInferRequest(model_name=model, id=str(chance.randrange(9)))
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    made.parameters["max_tokens"].int64_param = 3
    if chance.random() < 0.3:
        made.parameters["stream"].bool_param = True
    encoded: bytes = made.SerializeToString()
    return encoded


def call(chance: random.Random, model: str, stream: int, *, data: bytes | None = None, compressed: int = 0) -> list[bytes]:
    """The frames of one call."""
    body = message(chance, model) if data is None else data
    path = f"/{wire.SERVICE}/{chance.choice(METHODS)}".encode()
    fields = {"__method": b"POST", "__scheme": b"http", "__path": path, "__authority": b"x", "te": b"trailers", "content_type": b"application/grpc"}
    return [
        frame(HEADERS, header_block(**fields), flags=END_HEADERS, stream=stream),
        frame(DATA, struct.pack(">BI", compressed, len(body)) + body, flags=END_STREAM, stream=stream),
    ]


def conversation(chance: random.Random, model: str) -> list[bytes]:
    """What a good client sends, frame by frame."""
    frames = [PREFACE + frame(SETTINGS)]
    for number in range(chance.randint(1, 4)):
        frames += call(chance, model, 2 * number + 1)
    return frames


def random_frames(chance: random.Random) -> Iterator[bytes]:
    for _ in range(chance.randint(1, 12)):
        payload = chance.randbytes(chance.choice((0, 4, 5, 8, 13, 200)))
        length = None if chance.random() < 0.8 else chance.choice((0, 1, 16_384, 16_385, 2**24 - 1))
        kind, stream = chance.choice((*range(10), 0x42)), chance.choice((0, 1, 1, 2, 3, 2**31 - 1))
        yield frame(kind, payload, flags=chance.choice((0, 1, 4, 5, 8, 0x20, 0xFF)), stream=stream, length=length)


class FrameAttacks:
    """Attacks on the gRPC port of a server of `model`."""

    def __init__(self, model: str) -> None:
        self._model = model
        kinds = (
            self.mutated,
            self.mutated,
            self.truncated,
            self.garbage_between,
            self.bad_message,
            self.floods,
            self.slow,
            self.half_closed,
            self.not_http2,
        )
        self.all: tuple[Callable[[random.Random], Attack], ...] = kinds

    def mutated(self, chance: random.Random) -> Attack:
        data = bytearray(b"".join(conversation(chance, self._model)))
        for _ in range(chance.randint(1, 5)):
            at = chance.randrange(len(PREFACE), len(data))
            match chance.randrange(3):
                case 0:
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at:at] = chance.randbytes(chance.randint(1, 20))
                case 2:
                    del data[at : at + chance.randint(1, 20)]
            if len(data) <= len(PREFACE):
                break
        return Attack(kind="frames: mutated", pieces=(bytes(data),))

    def truncated(self, chance: random.Random) -> Attack:
        data = b"".join(conversation(chance, self._model))
        return Attack(kind="frames: truncated", pieces=(data[: chance.randrange(1, len(data))],), half_close=chance.random() < 0.5)

    def garbage_between(self, chance: random.Random) -> Attack:
        frames = conversation(chance, self._model)
        at = chance.randrange(1, len(frames) + 1)
        return Attack(kind="frames: garbage", pieces=(b"".join((*frames[:at], *random_frames(chance), *frames[at:])),))

    def bad_message(self, chance: random.Random) -> Attack:
        body = bytearray(message(chance, self._model))
        for _ in range(chance.randint(1, 4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        data = chance.choice((bytes(body), chance.randbytes(50), b"", b"\x0a\xff\xff\xff\xff\x0f"))
        frames = [PREFACE + frame(SETTINGS), *call(chance, self._model, 1, data=data, compressed=chance.choice((0, 0, 1, 7)))]
        return Attack(kind="frames: bad message", pieces=(b"".join(frames),))

    def floods(self, chance: random.Random) -> Attack:
        one = chance.choice(
            (
                frame(PING, bytes(8)),
                frame(SETTINGS),
                frame(RST_STREAM, bytes(4), stream=1),
                frame(WINDOW_UPDATE, b"\x7f\xff\xff\xff"),
                frame(CONTINUATION, b"\x00\x01a\x01b", stream=1),
                frame(DATA, b"", stream=1),
            )
        )
        start = b"".join(call(chance, self._model, 1)[: chance.randint(0, 2)])
        return Attack(kind="frames: flood", pieces=(PREFACE + frame(SETTINGS) + start + one * chance.choice((10, 1000, 5000)),))

    def slow(self, chance: random.Random) -> Attack:
        data = b"".join(conversation(chance, self._model))
        size = chance.choice((2, 20))
        pieces = tuple(data[at : at + size] for at in range(0, len(data), size))
        return Attack(kind="frames: slow", pieces=pieces, pause=chance.choice((0.01, 0.1)))

    def half_closed(self, chance: random.Random) -> Attack:
        return Attack(kind="frames: half-closed", pieces=(b"".join(conversation(chance, self._model)),), half_close=True)

    def not_http2(self, chance: random.Random) -> Attack:
        data = chance.choice((request(chance), TLS_HELLO, PREFACE[: chance.randrange(1, 24)], chance.randbytes(300), PREFACE + request(chance)))
        return Attack(kind="frames: no HTTP/2", pieces=(data,))


def call_has_ended(data: bytes) -> bool:
    """Whether the server has ended a call, or the connection, in the frames it sent."""
    at = 0
    while at + 9 <= len(data):
        length = int.from_bytes(data[at : at + 3], "big")
        kind, flags = data[at + 3], data[at + 4]
        if kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
            return True
        at += 9 + length
    return False
