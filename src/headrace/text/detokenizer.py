"""Token ids to text while they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from headrace.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Pieces of text that put together are exactly `tokenizer.decode(all ids)`; a character comes when its last byte has come.

    `continues`: the ids go on from a prompt. Then the space at the start of their first word, which decode of a SentencePiece tokenizer
    leaves out, is part of the text. `shown_token_ids`: special tokens that are not skipped with the others.
    """

    __slots__ = ("_at_start", "_decoder", "_skipped", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown_token_ids: Sequence[int] = (), continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids.difference(shown_token_ids) if skip_special_tokens else frozenset()
        self._decoder = _utf8_decoder(errors="replace")
        self._at_start = tokenizer.strips_leading_space and not continues

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        ids = [token_id for token_id in token_ids if token_id not in self._skipped]
        return self._without_first_space(self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids))))

    def finish(self) -> str:
        """What is left: U+FFFD if the ids ended inside a character. Nothing may be pushed after it."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
