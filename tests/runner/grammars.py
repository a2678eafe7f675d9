"""Grammars for a runner without an engine around it: a vocabulary of 127 single bytes, some longer tokens among them, and the end token 127."""

from __future__ import annotations

from collections.abc import Mapping

from llguidance import LLMatcher

from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar_compiler import compile_matcher
from headrace.text.grammar_vocabulary import GrammarVocabulary
from tests.runner.tiny_model import EOS

# in the place of control characters
LONGER = dict(enumerate([b'{"', b'":', b'", "', b"true", b"red", b'"}', b"ab", b"12", b" and "], start=1))
TOKENS = (*(LONGER.get(token, bytes([token])) for token in range(127)), b"</s>")


class Grammars:
    """A `GrammarSource` whose requests are known beforehand."""

    def __init__(self, structured: Mapping[str, StructuredOutputs], *, control: tuple[int, ...] = (0,)) -> None:
        vocabulary = GrammarVocabulary(tokens=TOKENS, control_token_ids=(*control, *EOS), end_token_ids=EOS)
        tokenizer = vocabulary.library_tokenizer()
        self.end_token_ids = EOS
        self.num_tokens = tokenizer.vocab_size
        self.structured = structured
        self._matchers = {name: compile_matcher(form, tokenizer) for name, form in structured.items()}

    def new_matcher(self, request_id: str) -> LLMatcher | None:
        matcher = self._matchers.get(request_id)
        return None if matcher is None else matcher.deep_copy()


def text_of(token_ids: list[int] | tuple[int, ...]) -> str:
    return b"".join(TOKENS[token] for token in token_ids if token not in EOS).decode()
