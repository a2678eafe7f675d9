"""Tells models apart by what their files hold, wherever they lie, without reading gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLES = 64  # pieces of each weight file that are read, evenly spread
SAMPLE_BYTES = 64 * 1024
WEIGHTS = (".gguf", ".safetensors")


def content_digest(model: str) -> str:
    """A digest over the size of every weight file and pieces of it, and over all of config.json. `model`: a directory or a GGUF file."""
    path = Path(model)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in WEIGHTS or file.name == "config.json")
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.suffix} {size}\n".encode())
        step = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (SAMPLES - 1))
        with file.open("rb") as stream:
            for offset in range(0, size, step):
                stream.seek(offset)
                digest.update(stream.read(SAMPLE_BYTES))
            stream.seek(max(0, size - SAMPLE_BYTES))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
