"""The raw bytes of each token, worked out once from the decoder of a tokenizer.json.

Every text that is decoded is a concatenation of these bytes, read as UTF-8. In a torn run of SentencePiece byte tokens this keeps the
characters that are whole, where the tokenizers library replaces the entire run by U+FFFD.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from headrace.errors import ModelLoadError

SPACE_MARK = "▁"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRule:
    """How the texts of tokens become bytes."""

    byte_level: bool  # each character of a token stands for one byte
    byte_fallback: bool = False  # tokens <0x00> ... <0xFF> are single bytes
    strips_space: bool = False  # one space at the start of a whole text belongs to no text


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters: printable Latin-1 stands for itself, the other bytes for U+0100 onward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def decoding_rule(decoder: dict[str, Any] | None) -> DecodingRule:
    """Read the `decoder` of a tokenizer.json. Raises `ModelLoadError` for kinds that no model we serve has."""
    steps = [decoder] if decoder and decoder["type"] != "Sequence" else (decoder or {}).get("decoders", [])
    if any(step["type"] == "ByteLevel" for step in steps):
        return DecodingRule(byte_level=True)
    if not steps:
        raise ModelLoadError("tokenizer.json has no decoder; save the tokenizer again with a recent transformers.")
    byte_fallback = strips_space = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "} | {"type": "Fuse"}:
                pass
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                strips_space = start > 0
            case {"type": "Metaspace"}:
                strips_space = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
            case _:
                raise ModelLoadError(f"tokenizer.json: decoder {step['type']} is not supported (ByteLevel and SentencePiece decoders are).")
    return DecodingRule(byte_level=False, byte_fallback=byte_fallback, strips_space=strips_space)


def token_bytes_table(vocab: dict[str, int], added: dict[str, int], rule: DecodingRule) -> list[bytes]:
    """The bytes of each id; ids that no token has are empty. `added` tokens are their text."""
    table = [b""] * (1 + max([*vocab.values(), *added.values()], default=-1))
    alphabet = byte_alphabet()
    for text, token_id in vocab.items():
        if rule.byte_level:
            known = [alphabet[char] for char in text if char in alphabet]
            table[token_id] = bytes(known) if len(known) == len(text) else text.encode()
        elif rule.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            table[token_id] = bytes([int(byte[1], 16)])
        else:
            table[token_id] = text.replace(SPACE_MARK, " ").encode()
    for text, token_id in added.items():
        table[token_id] = (text if rule.byte_level else text.replace(SPACE_MARK, " ")).encode()
    return table
