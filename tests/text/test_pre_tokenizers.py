import json

import pytest
from tokenizers.pre_tokenizers import PreTokenizer, Sequence

from headrace.text.pre_tokenizers import PATTERNS, pre_tokenizer
from headrace.text.token_bytes import byte_alphabet
from tests.text.tiny_tokenizers import varied_lines


def load(name: str) -> PreTokenizer:
    """The library makes pre-tokenizers from JSON only inside of a tokenizer."""
    from tokenizers import Tokenizer

    definition = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": pre_tokenizer(name, "x"),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    loaded = Tokenizer.from_str(json.dumps(definition)).pre_tokenizer
    assert isinstance(loaded, Sequence)
    return loaded


def words(name: str, text: str) -> list[str]:
    alphabet = byte_alphabet()
    return [bytes(alphabet[char] for char in word).decode() for word, _ in load(name).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'll IT'S 1234", ["I", "'ll", " IT", "'", "S", " 1234"]),
        ("smollm", "x  12 y", ["x", "  ", "1", "2", " y"]),
        ("llama-bpe", "IT'S 1234567\n\n x", ["IT", "'S", " ", "123", "456", "7", "\n\n", " x"]),
        ("qwen2", "IT'S 123;\n", ["IT", "'S", " ", "1", "2", "3", ";\n"]),
        ("tekken", "HelloWorld a/b 12", ["Hello", "World", " a", "/b", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-llm", "ab 日本 12,c\n", ["ab", " ", "日本", " ", "12", ",", "c", "\n"]),
        ("deepseek-coder", "a, 12\r\n", ["a", ",", " ", "1", "2", "\r", "\n"]),
        ("deepseek-v3", "日本1234 don't", ["日本", "123", "4", " don", "'t"]),
    ],
)
def test_words(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_nothing_is_lost(name: str) -> None:
    cut = load(name)
    alphabet = byte_alphabet()
    for line in varied_lines(50):
        text = "".join(word for word, _ in cut.pre_tokenize_str(line))
        assert bytes(alphabet[char] for char in text).decode() == line
