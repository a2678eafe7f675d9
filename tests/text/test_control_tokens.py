import re
import time

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.control_tokens import hide_control_tokens, literal_pattern, looks_like_control

texts = st.text(alphabet="ab<|.*", min_size=1, max_size=5)


@given(words=st.lists(texts, min_size=1, max_size=8), text=st.text(alphabet="ab<|.*", max_size=30))
def test_pattern_finds_the_leftmost_longest(words: list[str], text: str) -> None:
    pattern = literal_pattern(words)
    assert pattern is not None
    naive = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
    assert [match.span() for match in pattern.finditer(text)] == [match.span() for match in naive.finditer(text)]


def test_no_words_no_pattern() -> None:
    assert literal_pattern([]) is None


def test_thousands_of_tokens_are_found_quickly() -> None:
    pattern = literal_pattern([f"<unused{index}>" for index in range(6000)])
    assert pattern is not None
    start = time.thread_time()
    assert len(pattern.findall("<unused5999> <unusedx> <div>" * 20_000)) == 20_000
    assert time.thread_time() - start < 1.0


def test_what_looks_like_control() -> None:
    assert all(map(looks_like_control, ["<|user|>", "<｜User｜>", "<|a|>"]))
    assert not any(map(looks_like_control, ["<think>", "<||>", "<|x", "|>"]))


def test_unigram_vocabulary_is_a_list() -> None:
    definition = {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": []}
    marks = hide_control_tokens(definition, {"<unk>": 0})
    assert definition["model"]["vocab"] == [[marks["<unk>"], 0.0], ["a", -1.0]]


def test_marks_cannot_be_known() -> None:
    def marks() -> dict[str, str]:
        return hide_control_tokens({"model": {"vocab": {"<s>": 0}}, "added_tokens": []}, {"<s>": 0})

    assert marks() != marks()
