"""A tokenizer from the metadata of a GGUF file, rebuilt in the form of tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, overload

from headrace.errors import ModelLoadError
from headrace.text.pre_tokenizers import ADDS_BOS, IGNORES_MERGES, pre_tokenizer
from headrace.text.token_bytes import SPACE_MARK
from headrace.text.tokenizer_spec import TokenizerSpec


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eos", "eot", "eom")
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)


def read_metadata(metadata: Mapping[str, Any], source: str) -> TokenizerSpec:
    """`metadata` holds at least the keys under `tokenizer.`; `source` names the file in errors.

    Raises `ModelLoadError` for kinds of tokenizers that are not supported and for special ids beyond the vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelLoadError(f"{source} has no tokenizer (tokenizer.ggml.tokens is missing).")
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    types = [int(value) for value in metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise ModelLoadError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens.")
    special = _special_ids(metadata, len(tokens), source)
    for role in ("bos", *_ENDS, "unknown"):  # files without types, or with wrong ones, still name these
        token_id = special.get(role)
        # Only what is written as such: there are files whose start token is a comma.
        if token_id is not None and types[token_id] == TokenType.NORMAL and _BRACKETED.fullmatch(tokens[token_id]):
            types[token_id] = TokenType.CONTROL
    if kind == "gpt2":
        definition = _byte_level(metadata, tokens, source)
        adds_bos = metadata.get("tokenizer.ggml.pre") in ADDS_BOS
    elif kind == "llama":
        definition = _sentencepiece(metadata, tokens, types, source)
        adds_bos = True
    else:
        raise ModelLoadError(f"{source}: tokenizer.ggml.model {kind!r} is not supported; gpt2 (byte-level BPE) and llama (SentencePiece) are.")
    definition["added_tokens"] = _added_tokens(tokens, types)
    return TokenizerSpec(
        source=source,
        definition=definition,
        bos_token_id=special.get("bos"),
        eos_token_id=special.get("eos"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        stop_token_ids=frozenset(special[role] for role in _ENDS if role in special),
        chat_template=metadata.get("tokenizer.chat_template"),
        named_tokens={name: tokens[special[role]] for name, role in _NAMED.items() if role in special},
    )


def _special_ids(metadata: Mapping[str, Any], num_tokens: int, source: str) -> dict[str, int]:
    """Role -> id of every `tokenizer.ggml.<role>_token_id`."""
    prefix, suffix = "tokenizer.ggml.", "_token_id"
    found = {key[len(prefix) : -len(suffix)]: int(value) for key, value in metadata.items() if key.startswith(prefix) and key.endswith(suffix)}
    for role, token_id in found.items():
        if not 0 <= token_id < num_tokens:
            raise ModelLoadError(f"{source}: {prefix}{role}{suffix} is {token_id}, beyond the vocabulary of {num_tokens} tokens.")
    return found


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in text before anything else."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    seen: set[str] = set()
    added = []
    for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED) and text and text not in seen:
            seen.add(text)
            added.append({"id": token_id, "content": text, "special": kind != TokenType.USER_DEFINED, **plain})
    return added


def _first_ids(tokens: list[str]) -> dict[str, int]:
    """Text -> id; of a text that comes twice the first id holds."""
    vocab: dict[str, int] = {}
    for token_id, text in enumerate(tokens):
        vocab.setdefault(text, token_id)
    return vocab


def _bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> dict[str, Any]:
    base = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {**base, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges, **options}


class _Merges(Sequence[tuple[str, str]]):
    """Texts "left right" as pairs, made while they are read: held at once, a vocabulary's take more than its tokens."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for text in self._texts:
            left, _, right = str(text).partition(" ")
            yield left, right

    @overload
    def __getitem__(self, index: int) -> tuple[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, str]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, str] | list[tuple[str, str]]:
        return list(self)[index]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], source: str) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre")
    vocab = _first_ids(tokens)
    merges = _Merges(metadata.get("tokenizer.ggml.merges", ()))
    for index, (left, right) in enumerate(merges):
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelLoadError(f"{source}: merge {index} ({f'{left} {right}'!r}) is not made of tokens of the vocabulary.")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer(name, source),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": _bpe(vocab, merges, ignore_merges=name in IGNORES_MERGES),
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> dict[str, Any]:
    """As llama.cpp reads such files: the space goes before every stretch of text, at the start and after each control token."""
    scores = [float(score) for score in metadata.get("tokenizer.ggml.scores", ())]
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{source}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens.")
    normal = [kind == TokenType.NORMAL for kind in types]
    vocab = _first_ids([text.replace(" ", SPACE_MARK) if is_normal else text for text, is_normal in zip(tokens, normal, strict=True)])
    pieces = {text: (scores[token_id], token_id) for text, token_id in vocab.items() if normal[token_id]}
    # A character that has no piece of its own still merges with its neighbours; alone it falls back to its byte.
    singles = {char for text in pieces for char in text if char.isascii()} - pieces.keys()
    byte_ids = {char: vocab.get(f"<0x{ord(char):02X}>") for char in singles}
    parts = pieces.keys() | {char for char, token_id in byte_ids.items() if token_id is not None}
    vocab.update({char: token_id for char, token_id in byte_ids.items() if token_id is not None and char not in vocab})
    byte_fallback = any(kind == TokenType.BYTE for kind in types)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    options = {"fuse_unk": True, "byte_fallback": byte_fallback, "unk_token": None if unknown is None else tokens[int(unknown)]}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE_MARK}, space]} if prefix else space,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, _merges_from_scores(pieces, parts), **options),
    }


def _merges_from_scores(pieces: dict[str, tuple[float, int]], parts: set[str]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose piece has the best score; as BPE that is every way to cut each piece, best piece first."""
    merges = []
    for text in sorted(pieces, key=lambda piece: (-pieces[piece][0], pieces[piece][1])):
        merges += [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in parts and text[cut:] in parts]
    return merges
