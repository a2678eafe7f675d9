import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.text.stop_checker import MAX_STOP_CHARS, StopChecker


def run(pieces: list[str], stop: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stop, include_stop_str=include)
    emitted = []
    for piece in pieces:
        text, matched = checker.push(piece)
        emitted.append(text)
        if matched is not None:
            assert checker.finish() == ""
            return emitted, matched
    return [*emitted, checker.finish()], None


def naive(text: str, stop: list[str], *, include: bool) -> tuple[str, str | None]:
    """Look at every beginning of the text in turn."""
    for end in range(1, len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


alphabet = st.text(alphabet="ab\n🫠", max_size=12)


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(alphabet, max_size=8), stop=st.lists(alphabet.filter(bool), min_size=1, max_size=5), include=st.booleans())
def test_same_as_a_naive_search(pieces: list[str], stop: list[str], include: bool) -> None:
    emitted, matched = run(pieces, stop, include=include)
    assert ("".join(emitted), matched) == naive("".join(pieces), stop, include=include)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(alphabet, max_size=8), stop=st.lists(alphabet.filter(bool), min_size=1, max_size=3))
def test_no_more_than_needed_is_held_back(pieces: list[str], stop: list[str]) -> None:
    checker = StopChecker(stop)
    seen = sent = ""
    for piece in pieces:
        text, matched = checker.push(piece)
        if matched is not None:
            return
        seen, sent = seen + piece, sent + text
        held = seen[len(sent) :]
        beginnings = [word[:length] for word in stop for length in range(1, len(word)) if seen.endswith(word[:length])]
        assert held == max(beginnings, key=len, default="")


def test_stop_string_of_several_pieces() -> None:
    assert run([" H", " I", " J", " K", " L"], ["I J K"]) == ([" H", " ", "", ""], "I J K")


def test_held_text_is_not_lost() -> None:
    assert run([" 4,", " 5,"], [" 4, 5, and then never"]) == (["", "", " 4, 5,"], None)


def test_what_follows_a_match_is_dropped() -> None:
    assert run(["one two three"], ["two"]) == (["one "], "two")
    assert run(["one two three"], ["two"], include=True) == (["one two"], "two")


def test_first_complete_match_wins_however_the_text_is_cut() -> None:
    assert run(["abcd"], ["abcd", "bc"]) == (["a"], "bc")
    assert run(list("abcd"), ["abcd", "bc"]) == (["", "", "a"], "bc")
    assert run(["xab"], ["b", "ab"]) == (["x"], "ab")


def test_no_stop_strings() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_nothing_may_follow_a_match() -> None:
    checker = StopChecker(["a"])
    checker.push("a")
    with pytest.raises(AssertionError, match="after a stop string"):
        checker.push("b")


def test_long_stop_strings_are_refused_and_the_longest_allowed_is_quick() -> None:
    with pytest.raises(InvalidRequest, match="8192") as caught:
        StopChecker(["a" * MAX_STOP_CHARS, "b"])
    assert caught.value.param == "stop"
    text = ("a" * (MAX_STOP_CHARS - 2) + "c") * 20
    emitted, matched = run([text[index : index + 7] for index in range(0, len(text), 7)], ["a" * (MAX_STOP_CHARS - 1) + "b"])
    assert "".join(emitted) == text
    assert matched is None
