"""The tokens of a tokenizer as the grammar library needs them. A value that other processes can be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarVocabulary:
    """Control tokens are known by name only: no text that a grammar allows is ever spelt with one."""

    tokens: tuple[bytes, ...]  # of each id; empty: never allowed
    control_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]  # at least one; allowed where the answer may end

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GrammarVocabulary:
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        ends = set(tokenizer.stop_token_ids)
        if tokenizer.eos_token_id is not None:
            ends.add(tokenizer.eos_token_id)
        control = ends | set(tokenizer.special_tokens.values()) | tokenizer.skipped_ids
        if not ends:  # the library must have one; no model has a row for this one
            ends = {len(tokens)}
            tokens.append(b"</>")
            control |= ends
        return cls(tokens=tuple(tokens), control_token_ids=tuple(sorted(control)), end_token_ids=tuple(sorted(ends)))

    def library_tokenizer(self) -> LLTokenizer:
        """Takes a tenth to a quarter of a second, and about 20 MiB."""
        from llguidance import LLTokenizer, TokenizerWrapper

        words = _Words(self)
        words.library = LLTokenizer(TokenizerWrapper(words), eos_token=list(self.end_token_ids))
        return words.library


class _Words:
    """What `TokenizerWrapper` asks for."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.control_token_ids)
        self.eos_token_id = vocabulary.end_token_ids[0]
        self.bos_token_id = None
        self.library: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell `text`. Only for forced text would the library need the model's own, and `grammar.OPTIONS` forces none."""
        return [] if self.library is None else self.library.greedy_tokenize(text.decode("utf-8", "replace"))
