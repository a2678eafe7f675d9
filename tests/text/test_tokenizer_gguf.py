import json
import logging
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from headrace.errors import ModelLoadError
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_gguf import TokenType, read_metadata
from tests.text.tiny_tokenizers import CORPUS, byte_level_metadata, from_metadata, sentencepiece_metadata, varied_lines


def test_byte_level_ids_are_those_of_tokenizer_json(byte_level: Tokenizer) -> None:
    tokenizer = from_metadata(byte_level_metadata())
    for line in [*varied_lines(300), "a<s>b<think>c<|im_end|>!"]:
        assert tokenizer.encode(line) == byte_level.encode(line)
        assert tokenizer.encode(line, parse_special=False) == byte_level.encode(line, parse_special=False)
    assert tokenizer.special_tokens == byte_level.special_tokens
    assert [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)] == [
        byte_level.token_bytes(token_id) for token_id in range(byte_level.vocab_size)
    ]


def test_sentencepiece_ids_are_those_of_sentencepiece(sentencepiece: Tokenizer, sentencepiece_model: Any) -> None:
    for line in [*CORPUS, *varied_lines(500), " a", "  a", "a ", "\t\t\t", "<s>", "<turn>"]:
        line = line.replace("\x00", "")  # SentencePiece's own interface ends a text there
        ids = sentencepiece.encode(line, add_special_tokens=False, parse_special=False)
        assert ids == sentencepiece_model.encode(line), line
        assert sentencepiece.decode(ids) == line


def test_space_prefix_can_be_off(sentencepiece_model: Any) -> None:
    tokenizer = from_metadata(sentencepiece_metadata(sentencepiece_model) | {"tokenizer.ggml.add_space_prefix": False})
    for line in (" fox", "fox", "  The quick"):
        assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    assert tokenizer.encode(" fox") != tokenizer.encode("fox")


def test_control_pieces_come_from_no_text(sentencepiece: Tokenizer) -> None:
    assert {"<s>", "</s>", "<unk>", "<turn>"} == set(sentencepiece.special_tokens)
    for text in sentencepiece.special_tokens:
        ids = sentencepiece.encode(f"a {text} b", parse_special=False, add_special_tokens=False)
        assert not set(ids) & set(sentencepiece.special_tokens.values())
        assert sentencepiece.decode(ids) == f"a {text} b"
        assert sentencepiece.special_tokens[text] in sentencepiece.encode(f"a {text} b")


def test_a_character_without_a_piece_still_merges() -> None:
    """Tabs in pairs have a piece, a single one is its byte."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\t\t", "a"]
    types = [TokenType.UNKNOWN, *[TokenType.BYTE] * 256, TokenType.NORMAL, TokenType.NORMAL]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 257 + [-1.0, -2.0],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = from_metadata(metadata)
    assert tokenizer.encode("a\t\t\ta") == [258, 257, 10, 258]
    assert tokenizer.encode("\ta") == [10, 258]


@pytest.mark.parametrize(("flag", "ids"), [(True, [0]), (False, []), (None, [])])
def test_start_token_flag_of_byte_level(flag: bool | None, ids: list[int]) -> None:
    extra = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    assert from_metadata(byte_level_metadata() | extra).encode("") == ids


@pytest.mark.parametrize(("flag", "adds"), [(True, True), (False, False), (None, True)])
def test_start_token_flag_of_sentencepiece(sentencepiece_model: Any, flag: bool | None, adds: bool) -> None:
    extra = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = from_metadata(sentencepiece_metadata(sentencepiece_model) | extra)
    assert tokenizer.encode("") == ([tokenizer.bos_token_id] if adds else [])


def test_pre_tokenizer_decides_where_the_flag_is_absent() -> None:
    assert from_metadata(byte_level_metadata() | {"tokenizer.ggml.pre": "llama-bpe"}).encode("") == [0]


@pytest.mark.parametrize("role", ["bos", "eos", "eot", "unknown", "padding"])
def test_special_id_beyond_the_vocabulary(role: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf: tokenizer\.ggml\.{role}_token_id is 40000, beyond the vocabulary"):
        from_metadata(byte_level_metadata() | {f"tokenizer.ggml.{role}_token_id": 40_000})


def test_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="pre-tokenizer 'martian'"):
        from_metadata(byte_level_metadata() | {"tokenizer.ggml.pre": "martian"})


def test_missing_pre_tokenizer_is_a_warning(byte_level: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        tokenizer = from_metadata(metadata)
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.encode("The quick 123") == byte_level.encode("The quick 123")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "merge 0"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries"),
        ({"tokenizer.ggml.model": "llama"}, "scores has 0 entries"),
    ],
)
def test_wrong_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        from_metadata(byte_level_metadata() | change)


def test_no_tokenizer_at_all() -> None:
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        from_metadata({"tokenizer.ggml.model": "gpt2"})


def test_all_ends_are_known() -> None:
    ends = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4}
    assert from_metadata(byte_level_metadata() | ends).stop_token_ids == {1, 3, 4}


def test_named_tokens_without_types_are_control() -> None:
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.token_type"]
    assert from_metadata(metadata).special_tokens.keys() >= {"<s>", "</s>"}
    comma = metadata["tokenizer.ggml.tokens"].index(",")
    tokenizer = from_metadata(metadata | {"tokenizer.ggml.bos_token_id": comma})
    assert "," not in tokenizer.special_tokens
    assert tokenizer.encode(",", parse_special=False) == [comma]


def test_space_only_before_the_first_word(sentencepiece_model: Any) -> None:
    """The newer form of SentencePiece in tokenizer.json: what follows a control token gets no space; ids are the library's."""
    spec = read_metadata(sentencepiece_metadata(sentencepiece_model), "tiny.gguf")
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    spec.definition |= {"normalizer": None, "pre_tokenizer": metaspace}
    library = Library.from_str(json.dumps(spec.definition))
    tokenizer = Tokenizer(spec)
    for text in ("a fox<turn>the dog", "<turn>the dog", "<turn> the dog", "the dog<turn>", "a<think>b"):
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("a fox<turn>the dog"), skip_special_tokens=False) == "<s> a fox<turn>the dog"
