"""Tokens as the grammar library sees them, for every kind of tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar_compiler import compile_matcher
from headrace.text.grammar_vocabulary import GrammarVocabulary
from headrace.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_level, byte_level_metadata, from_metadata, sentencepiece_metadata, sentencepiece_model

ANY = StructuredOutputs(kind="regex", source="(?s:.*)")
FORM = StructuredOutputs(kind="regex", source="(naïve |日本|[ \\n]|🫠|<s>|<think>){3,12}")


@pytest.fixture(scope="module", params=["byte level", "byte level, GGUF", "SentencePiece, GGUF"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "byte level":
        return byte_level(tmp_path_factory.mktemp("tokenizer"))
    return from_metadata(byte_level_metadata() if "byte" in request.param else sentencepiece_metadata(sentencepiece_model()))


def allowed(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def test_control_tokens_are_never_allowed_in_text(tokenizer: Tokenizer) -> None:
    vocabulary = GrammarVocabulary.of(tokenizer)
    matcher = compile_matcher(ANY, vocabulary.library_tokenizer())
    found = set(allowed(matcher.compute_bitmask()))
    control = set(tokenizer.special_tokens.values()) | tokenizer.skipped_ids
    assert control
    assert found & control == set(vocabulary.end_token_ids)
    for token in found - control:
        assert tokenizer.token_bytes(token)
    starts = {token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) and not 0x80 <= tokenizer.token_bytes(token)[0] < 0xC0}
    assert len(found) > 0.9 * len(starts - control)


def test_tokens_spell_the_form_byte_by_byte(tokenizer: Tokenizer) -> None:
    vocabulary = GrammarVocabulary.of(tokenizer)
    library = vocabulary.library_tokenizer()
    draw = random.Random(5)
    for _ in range(20):
        matcher = compile_matcher(FORM, library)
        ids: list[int] = []
        while True:
            token = draw.choice(allowed(matcher.compute_bitmask()))
            if token in vocabulary.end_token_ids:
                break
            ids.append(token)
            assert matcher.consume_token(token)
            if matcher.is_stopped():
                break
        text = b"".join(map(tokenizer.token_bytes, ids)).decode()
        rest = compile_matcher(FORM, library)
        assert rest.consume_tokens(library.greedy_tokenize(text))
        assert rest.is_accepting()


def test_a_tokenizer_without_an_end_token(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, eos_token=None)
    assert not tokenizer.stop_token_ids
    vocabulary = GrammarVocabulary.of(tokenizer)
    assert vocabulary.end_token_ids == (tokenizer.vocab_size,)  # one that no model has a row for
    matcher = compile_matcher(StructuredOutputs(kind="choice", source='["", "a"]'), vocabulary.library_tokenizer())
    assert matcher.is_accepting()
    assert vocabulary.end_token_ids[0] in allowed(matcher.compute_bitmask())
