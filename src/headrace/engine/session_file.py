"""One session in one file: a header, and its blocks with a checksum each.

    magic, 8 bytes | length of the header, 4 bytes little-endian | header, JSON | checksum of the header, 16 bytes
    then for each block: its content, `block_bytes` bytes | checksum over the header's checksum and the content, 16 bytes

A file is written beside its place and moved there once it is whole and on the disk, so a file in its place is never half a one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

MAGIC = b"HRSESS1\n"  # with the version of the format
DIGEST_BYTES = 16
MAX_HEADER_BYTES = 64 * 1024 * 1024
SUFFIX = ".session"
PARTIAL = ".partial"


class SessionFileError(Exception):
    """Why a file cannot be used, as the end of a sentence."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    identity: dict[str, str]  # see `Runner.kv_identity`
    session_id: str
    tenant: str
    salt: str | None
    lease_end: float  # seconds since the epoch
    token_ids: tuple[int, ...]  # of all blocks
    num_blocks: int
    block_bytes: int


def write_session(path: Path, header: Header, blocks: Iterable[bytes]) -> None:
    """Raises OSError; nothing is left behind then."""
    encoded = msgspec.json.encode(header)
    own = _digest(encoded)
    partial = path.with_suffix(PARTIAL)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(MAGIC + len(encoded).to_bytes(4, "little") + encoded + own)
            for block in blocks:
                stream.write(block)
                stream.write(_digest(own + block))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def file_bytes(header: Header) -> int:
    """What the header's file takes on the disk."""
    return _data_start(len(msgspec.json.encode(header))) + header.num_blocks * (header.block_bytes + DIGEST_BYTES)


def read_header(path: Path) -> Header:
    """Raises `SessionFileError` for what is no whole session, and OSError."""
    with path.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise SessionFileError("it is of another format or version")
        length = int.from_bytes(stream.read(4), "little")
        if length > MAX_HEADER_BYTES:
            raise SessionFileError("its header is damaged")
        encoded = stream.read(length)
        if stream.read(DIGEST_BYTES) != _digest(encoded):
            raise SessionFileError("its header is damaged")
        try:
            header = msgspec.json.decode(encoded, type=Header)
        except msgspec.MsgspecError as error:
            raise SessionFileError(f"its header is not understood: {error}") from error
        size = os.fstat(stream.fileno()).st_size
    expected = _data_start(length) + header.num_blocks * (header.block_bytes + DIGEST_BYTES)
    if size != expected:
        raise SessionFileError(f"it is torn: it has {size} bytes, not {expected}")
    return header


def read_blocks(path: Path, header: Header, start: int, stop: int) -> Iterator[bytes]:
    """The content of blocks start .. stop - 1. Raises `SessionFileError` at the first one that is damaged, and OSError."""
    encoded = msgspec.json.encode(header)
    own = _digest(encoded)
    with path.open("rb") as stream:
        stream.seek(_data_start(len(encoded)) + start * (header.block_bytes + DIGEST_BYTES))
        for index in range(start, stop):
            block = stream.read(header.block_bytes)
            if stream.read(DIGEST_BYTES) != _digest(own + block):
                raise SessionFileError(f"its block {index} is damaged")
            yield block


def _data_start(header_bytes: int) -> int:
    return len(MAGIC) + 4 + header_bytes + DIGEST_BYTES


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
