"""Text to token ids and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models

from headrace.errors import ModelLoadError
from headrace.text.control_tokens import hide_control_tokens, literal_pattern, looks_like_control
from headrace.text.token_bytes import decoding_rule, token_bytes_table
from headrace.text.tokenizer_spec import END_OF_TURN_TEXTS, TokenizerSpec

_BPE_FIELDS = {  # what the library can be given of a model without JSON
    *("type", "vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
}
_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """JSON can carry halves of surrogate pairs ("\\ud800"), which no encoding can; they become U+FFFD."""
    try:
        text.encode()  # much faster than a search, and almost always right
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


class Tokenizer:
    """A tokenizer of the model's own files. Nothing changes after it is made, so that threads share it; encoding releases the GIL."""

    def __init__(self, spec: TokenizerSpec) -> None:
        definition = spec.definition
        added = {token["content"]: token["id"] for token in definition["added_tokens"]}
        flagged = {token["content"]: token["id"] for token in definition["added_tokens"] if token["special"]}
        vocab = definition["model"]["vocab"]
        vocab = vocab if isinstance(vocab, dict) else {text: index for index, (text, _) in enumerate(vocab)}
        self._rule = decoding_rule(definition.get("decoder"))
        self._bytes = token_bytes_table(vocab, added, self._rule)
        # Text -> id of every token that steers the model, whatever its file calls it.
        self.special_tokens: dict[str, int] = {text: token_id for text, token_id in added.items() if text in flagged or looks_like_control(text)}
        # Ids that decode leaves out with skip_special_tokens: those the file calls special.
        self.skipped_ids: frozenset[int] = frozenset(flagged.values())
        self.control_pattern: re.Pattern[str] | None = literal_pattern(self.special_tokens)

        self.bos_token_id = spec.bos_token_id
        self.eos_token_id = spec.eos_token_id
        self.chat_template = spec.chat_template
        self.named_tokens = spec.named_tokens
        template = spec.chat_template or ""
        taught = {token_id for text, token_id in self.special_tokens.items() if text in END_OF_TURN_TEXTS and text in template}
        self.stop_token_ids: frozenset[int] = spec.stop_token_ids | taught
        # bytes(text) / max_token_bytes is a lower bound of the number of its tokens.
        self.max_token_bytes: int = max(len(raw) for raw in self._bytes)

        self._marks = hide_control_tokens(definition, self.special_tokens)
        self._library = _build(definition, spec.source)
        self._check_added({self._marks.get(text, text): token_id for text, token_id in added.items()}, spec.source)
        self._prefix, self._suffix = self._affixes(spec)

    @classmethod
    def load(cls, model_path: str | Path) -> Tokenizer:
        """The tokenizer of a model directory with tokenizer.json, or of a GGUF file. Raises `ModelLoadError`."""
        path = Path(model_path)
        if path.is_dir():
            from headrace.text.tokenizer_hf import read_directory

            return cls(read_directory(path))
        from headrace.models.gguf import GGUFFile
        from headrace.text.tokenizer_gguf import read_metadata

        return cls(read_metadata(GGUFFile(path).metadata, str(path)))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token; a model may have more rows than this."""
        return len(self._bytes)

    @property
    def strips_leading_space(self) -> bool:
        """Whether decode leaves out one space at the start (SentencePiece puts one before every text)."""
        return self._rule.strips_space

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `add_special_tokens`: put start and end tokens around it if this tokenizer does so. `parse_special`: the text of a
        control token becomes that token; without it, it is text like any other. Halves of surrogate pairs count as U+FFFD.
        """
        return self.encode_segments([(text, parse_special)], add_special_tokens=add_special_tokens)

    def encode_segments(self, segments: Iterable[tuple[str, bool]], *, add_special_tokens: bool = False) -> list[int]:
        """Ids of one text given as (part, parse_special) in order. Where parts meet, tokens may span both as in any other text."""
        text = "".join(self._mark_control(part) if parse_special else part for part, parse_special in segments)
        # Of the library's calls only those for batches let other threads run meanwhile.
        ids: list[int] = self._library.encode_batch_fast([replace_surrogates(text)], add_special_tokens=False)[0].ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids without a token are empty."""
        raw = b"".join(map(self.token_bytes, self.visible(ids) if skip_special_tokens else ids))
        text = raw.decode("utf-8", "replace")
        return text[1:] if self._rule.strips_space and text.startswith(" ") else text

    def visible(self, ids: Iterable[int]) -> list[int]:
        """`ids` without the special ones."""
        return [token_id for token_id in ids if token_id not in self.skipped_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token, perhaps a part of a character; of control tokens their text; empty where no token has this id."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def _mark_control(self, text: str) -> str:
        if self.control_pattern is None:
            return text
        return self.control_pattern.sub(lambda match: self._marks[match[0]], text)

    def _check_added(self, added: dict[str, int], source: str) -> None:
        """The library numbers added tokens itself; ids that do not follow on the vocabulary would silently become others."""
        original = {mark: text for text, mark in self._marks.items()}
        for text, token_id in added.items():
            if self._library.token_to_id(text) != token_id:
                raise ModelLoadError(f"{source}: added token {original.get(text, text)!r} has id {token_id}, which does not follow the vocabulary.")

    def _affixes(self, spec: TokenizerSpec) -> tuple[list[int], list[int]]:
        """Ids that go before and after a text: what the post-processor adds, unless the settings say otherwise."""
        bare = self._library.encode("a", add_special_tokens=False).ids
        full = self._library.encode("a", add_special_tokens=True).ids
        start = next(index for index in range(len(full) - len(bare) + 1) if full[index : index + len(bare)] == bare) if bare else len(full)
        prefix, suffix = full[:start], full[start + len(bare) :]
        for flag, token_id, name in ((spec.add_bos, self.bos_token_id, "add_bos_token"), (spec.add_eos, self.eos_token_id, "add_eos_token")):
            if flag and token_id is None:
                raise ModelLoadError(f"{spec.source}: {name} is set, but there is no such token.")
        if spec.add_bos is not None:
            prefix = [self.bos_token_id] if spec.add_bos and self.bos_token_id is not None else []
        if spec.add_eos is not None:
            suffix = [self.eos_token_id] if spec.add_eos and self.eos_token_id is not None else []
        return prefix, suffix


def _build(definition: dict[str, Any], source: str) -> tokenizers.Tokenizer:
    definition = definition | {"truncation": None, "padding": None}
    try:
        if definition["model"].get("type") == "BPE" and definition["model"].keys() <= _BPE_FIELDS:
            return _build_bpe(definition)
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{source}: the tokenizer cannot be built ({error}).") from error


def _build_bpe(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    """The same without the vocabulary and its merges as JSON, which takes the library several times their size."""
    model, added = definition["model"], definition["added_tokens"]
    empty = definition | {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    library = tokenizers.Tokenizer.from_str(json.dumps(empty))
    options = {name: value for name, value in model.items() if name not in ("type", "vocab", "merges") and value is not None}
    library.model = tokenizers.models.BPE(model["vocab"], model["merges"], **options)
    for token in added:
        settings = {name: value for name, value in token.items() if name not in ("id", "content")}
        one = [tokenizers.AddedToken(token["content"], **settings)]
        _ = library.add_special_tokens(one) if token["special"] else library.add_tokens(one)
    return library
