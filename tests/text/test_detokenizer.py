import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import Tokenizer

KINDS = ["byte_level", "sentencepiece"]


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def pieces(tokenizer: Tokenizer, groups: list[list[int]], *, skip: bool, continues: bool = False) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continues=continues)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_one_decode(request: pytest.FixtureRequest, kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    groups = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=6), max_size=12))
    ids = [token_id for group in groups for token_id in group]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, groups, skip=skip)) == whole
    assert "".join(pieces(tokenizer, [[token_id] for token_id in ids], skip=skip)) == whole


@pytest.mark.parametrize("skip", [True, False])
def test_torn_characters_come_out_alike(tokenizer: Tokenizer, skip: bool) -> None:
    """Many ids of single bytes: valid, broken and mixed sequences."""
    rng = random.Random(0)
    single = [token_id for token_id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token_id)) == 1]
    for _ in range(300):
        ids = rng.choices(single, k=rng.randint(1, 12))
        assert "".join(pieces(tokenizer, [[token_id] for token_id in ids], skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["🫠🥹龜😀", "日本語 한국어", "e\u0301 naïve", "    x\n\n\ty  "])
def test_characters_come_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(tokenizer, [[token_id] for token_id in ids], skip=True)
    assert "".join(got) == text
    assert "\ufffd" not in "".join(got)
    assert got[-1] == ""


def test_end_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🦖", add_special_tokens=False)[:-1]
    assert pieces(tokenizer, [ids], skip=True) == ["ab", "\ufffd"]
    assert tokenizer.decode(ids) == "ab\ufffd"


def test_whole_characters_of_a_torn_run_are_kept(sentencepiece: Tokenizer) -> None:
    first = next(token_id for token_id in range(sentencepiece.vocab_size) if sentencepiece.token_bytes(token_id) == b"\x00")
    ids = [first + byte for byte in "🫠".encode() + b"\xf0"]
    assert sentencepiece.decode(ids) == "🫠\ufffd"


def test_first_space_of_sentencepiece(sentencepiece: Tokenizer) -> None:
    """A text of its own loses the space that was put before it; an answer that goes on from a prompt keeps it."""
    ids = sentencepiece.encode("fox  dog", add_special_tokens=False)
    assert "".join(pieces(sentencepiece, [[token_id] for token_id in ids], skip=True)) == "fox  dog"
    assert "".join(pieces(sentencepiece, [[token_id] for token_id in ids], skip=True, continues=True)) == " fox  dog"


def test_first_space_of_byte_level(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(" fox")
    assert "".join(pieces(byte_level, [ids], skip=True)) == " fox"
