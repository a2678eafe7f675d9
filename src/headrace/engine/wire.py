"""What travels over the socket between the client and the engine process: msgpack in length-prefixed frames.

A frame is four bytes, the length of the rest in little-endian order, and one msgpack message. Every message is a small struct around the
frozen dataclasses of `core.messages`; its tag tells the kind. Decoding checks every field's type, and nothing in it can run code.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from headrace.config import CompileStatus, EngineConfig, EngineInfo
from headrace.core.explain import Explanation, Query
from headrace.core.messages import AbortRequest, AddRequest, Kernel, SchedulerStats, TokenOutput
from headrace.observe.work import Work
from headrace.text.grammar_vocabulary import GrammarVocabulary

HEADER_BYTES = 4
MAX_FRAME_BYTES = 512 * 1024 * 1024  # the prompt logprobs of a 128k prompt with 20 alternatives each take about 60 MiB


class WireError(Exception):
    """The bytes are not a frame of ours: the two sides do not belong together, or one of them is broken."""


class Configure(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The first frame to the engine."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=2, array_like=True):
    request: AddRequest


class Abort(msgspec.Struct, frozen=True, tag=3, array_like=True):
    request: AbortRequest


class Shutdown(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """The engine ends after the step that runs, and its process exits with 0."""


class Started(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """The model is loaded; requests are served from now on."""

    info: EngineInfo
    stats: SchedulerStats  # before the first request


class Failed(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The engine process ends: it could not start, or it cannot go on. The last frame from it."""

    kind: str  # class name of the error
    message: str
    exit_code: int


class Outputs(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """All outputs of one step or of one refusal."""

    outputs: tuple[TokenOutput, ...]
    retry_after: int | None = None  # whole seconds, where an output says queue_full


class Heartbeat(msgspec.Struct, frozen=True, tag=8, array_like=True):
    """Sent a few times a second while steps run, and once when the engine comes to rest."""

    stats: SchedulerStats
    step_started: float | None  # monotonic seconds; None: no step runs
    steps_total: int
    step_seconds_total: float  # wall time of the runner over all steps
    at: float  # monotonic seconds of this snapshot
    work: Work  # what the time from the engine's start up to `at` went into, but for the step that runs
    compile: CompileStatus | None = None  # how far faster paths are, and what they serve


class Vocabulary(msgspec.Struct, frozen=True, tag=9, array_like=True):
    """What the tokens of requests mean; sent before the first one with `params.structured`."""

    vocabulary: GrammarVocabulary


class Explain(msgspec.Struct, frozen=True, tag=10, array_like=True):
    """Asks what the prefix cache holds of a prompt."""

    query: Query


class Explained(msgspec.Struct, frozen=True, tag=11, array_like=True):
    """The answer, in the order of the questions."""

    explanation: Explanation


class Record(msgspec.Struct, frozen=True, tag=12, array_like=True):
    """Asks for a `StepTrace` of every step that starts before `until` (monotonic seconds)."""

    until: float
    kernels: bool = False  # their kernels are recorded, until another `Record` comes


class TracedRow(msgspec.Struct, frozen=True, array_like=True):
    """See `core.messages.Row`."""

    request_id: str
    start: int
    num_tokens: int
    num_speculated: int
    is_decode: bool  # one known token, and guesses behind it


class StepTrace(msgspec.Struct, frozen=True, tag=13, array_like=True):
    """A step that has ended well. Times are monotonic seconds."""

    step_id: int
    plan_begin: float
    plan_end: float
    started: float  # handed to the runner
    ended: float
    updated: float  # its result was taken in
    model_seconds: float
    path: str
    padded_tokens: int
    rows: tuple[TracedRow, ...]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A part of a prompt in a step. Times are monotonic seconds."""

    started: float
    ended: float
    start: int  # position of the first token
    num_tokens: int


class Timeline(msgspec.Struct, frozen=True, tag=14, array_like=True):
    """What the engine did for a request with `AddRequest.traced`. Sent before its last output."""

    request_id: str
    chunks: tuple[Chunk, ...]  # the first ones; after a preemption there are more than the prompt needs
    num_chunks: int  # all of them
    decode_begin: float | None  # monotonic seconds; None: no decode step
    decode_end: float | None
    num_decode_steps: int
    num_preemptions: int


class Kernels(msgspec.Struct, frozen=True, tag=15, array_like=True):
    """What was recorded of kernels; the answer to the `Record` that ended it."""

    kernels: tuple[Kernel, ...]
    error: str | None = None  # why there are none


ToEngine = Configure | Add | Abort | Shutdown | Vocabulary | Explain | Record
FromEngine = Started | Failed | Outputs | Heartbeat | Explained | StepTrace | Timeline | Kernels
Message = ToEngine | FromEngine

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(message: Message) -> bytes:
    """The message as one frame. Raises `WireError` if it is too long or holds what msgpack cannot carry."""
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} takes {len(body)} bytes; a frame holds at most {MAX_FRAME_BYTES}.")
    return struct.pack("<I", len(body)) + body


def body_length(header: bytes | bytearray) -> int:
    """Bytes that follow the header. Raises `WireError` if no frame of ours is that long."""
    (length,) = struct.unpack("<I", header)
    if not 1 <= length <= MAX_FRAME_BYTES:
        raise WireError(f"A frame of {length} bytes is announced; at most {MAX_FRAME_BYTES} are allowed.")
    return int(length)


def decode_to_engine(body: bytes | bytearray) -> ToEngine:
    try:
        return _to_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"A frame to the engine cannot be decoded: {error}") from error


def decode_from_engine(body: bytes | bytearray) -> FromEngine:
    try:
        return _from_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"A frame from the engine cannot be decoded: {error}") from error


def read_body(connection: socket.socket) -> bytearray | None:
    """Blocks for the next frame's body; None at the end of the stream, also in mid-frame."""
    header = _read_exactly(connection, HEADER_BYTES)
    return None if header is None else _read_exactly(connection, body_length(header))


def _read_exactly(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    filled = 0
    while filled < count:
        received = connection.recv_into(view[filled:])
        if received == 0:
            return None
        filled += received
    return data
