"""The process in which grammars are tried out: `python -m headrace.text.grammar_worker`, at the other end of a `GrammarChecker`'s pipes.

A frame is four bytes, the length of the rest in little-endian order, and one msgpack message. The first frame in is a `GrammarVocabulary`,
each further one a `StructuredOutputs`, which is answered with the reason why it is refused, or with nil. The process ends with its input.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
import threading
from typing import BinaryIO

import msgspec

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar_vocabulary import GrammarVocabulary

ALARM_S = 30.0  # the process ends by itself when its parent is no more there to kill it
MEMORY_BYTES = 4 * 1024**3  # of addresses; one that needs more ends the process
STACK_BYTES = 8 * 1024 * 1024  # less than where grammars are compiled for use: what fits here fits there


def read_frame(stream: BinaryIO) -> bytes | None:
    """None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    (length,) = struct.unpack("<I", header)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: BinaryIO, message: object) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(struct.pack("<I", len(body)) + body)
    stream.flush()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    from headrace.text.grammar_compiler import try_out  # not for those who only write frames: it loads the grammar library

    first = read_frame(source)
    if first is None:
        return
    tokenizer = msgspec.msgpack.decode(first, type=GrammarVocabulary).library_tokenizer()
    while (body := read_frame(source)) is not None:
        reason: str | None = None
        signal.setitimer(signal.ITIMER_REAL, ALARM_S)
        try:
            try_out(msgspec.msgpack.decode(body, type=StructuredOutputs), tokenizer)
        except InvalidRequest as error:
            reason = error.message
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sink, reason)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer), name="grammars")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
