"""From outputs to deltas: text, tokens, logprobs and stop strings agree, however the outputs are cut."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.messages import TokenLogprobs, TokenOutput
from headrace.engine.choice import Choice, ChoiceDelta
from headrace.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import END


def score(token: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token, logprob=-float(token), rank=1)


def run(tokenizer, ids: list[int], sizes: list[int], *, end: str = "length", stop_reason: int | None = None, limit: int = 1, **params: Any):
    """Feeds `ids` in outputs of the given sizes (over and over), taking a delta after each second one; returns (joined delta, early stop)."""
    choice = Choice(0, SamplingParams(max_tokens=1000, **params), tokenizer, limit=limit)
    deltas: list[ChoiceDelta] = []
    position = turn = 0
    early = False
    while not choice.finished:
        size = sizes[turn % len(sizes)]
        last = position + size >= len(ids)
        new = tuple(ids[position : position + size])
        output = TokenOutput(
            request_id="r",
            token_ids=new,
            logprobs=tuple(score(token) for token in new),
            cached_tokens=3 if turn == 0 else None,
            prompt_logprobs=(score(1),) if turn == 0 else None,
            finish_reason=end if last else None,
            stop_reason=stop_reason if last else None,
        )
        early = choice.push(output)
        position += size
        turn += 1
        if turn % 2 == 0 or choice.finished:
            deltas.append(choice.take())
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    joined = ChoiceDelta(
        index=0,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs or ()),
        prompt_logprobs=deltas[0].prompt_logprobs,
        cached_tokens=deltas[0].cached_tokens,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )
    assert [entry.token_id for entry in joined.logprobs] == list(joined.token_ids)
    assert all(delta.cached_tokens is None and delta.prompt_logprobs is None for delta in deltas[1:])
    return joined, early


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(deadline=None)
@given(st.text("abé🫠", max_size=20), SIZES)
def test_without_stop_strings_all_text_and_tokens_come(tokenizer, text, sizes):
    ids = [*tokenizer.encode(text), 65]
    joined, _ = run(tokenizer, ids, sizes)
    assert (joined.text, joined.token_ids, joined.finish_reason) == (text + "A", tuple(ids), "length")
    assert (joined.cached_tokens, joined.prompt_logprobs) == (3, (score(1),))


def expected(text: str, stop: list[str], include: bool, min_tokens: int) -> tuple[str, int, str | None]:
    """(text, tokens, matched) with one token a character, found by looking at every beginning of the text. Slow and plain."""
    searched = 0  # stop strings are looked for behind here
    for end in range(1, len(text) + 1):
        ending = [entry for entry in stop if text[searched:end].endswith(entry)]
        if not ending:
            continue
        if end < min_tokens:
            searched = end
            continue
        matched = max(ending, key=len)
        return text[: end if include else end - len(matched)], end, matched
    return text, len(text), None


@settings(deadline=None)
@given(
    st.text("ab", min_size=1, max_size=16),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    SIZES,
    st.booleans(),
    st.integers(0, 8),
)
def test_stop_strings_end_at_their_last_token(tokenizer, text, stop, sizes, include, min_tokens):
    """Nothing that was computed past it is seen, and nothing held back is lost; the same whatever the cut."""
    joined, early = run(tokenizer, tokenizer.encode(text), sizes, stop=tuple(stop), include_stop_str_in_output=include, min_tokens=min_tokens)
    wanted, count, matched = expected(text, stop, include, min_tokens)
    assert (joined.text, len(joined.token_ids)) == (wanted, count)
    assert (joined.finish_reason, joined.stop_reason) == (("stop", matched) if matched else ("length", None))
    if early:
        assert matched


def test_the_engine_is_told_when_a_stop_string_comes_first(tokenizer):
    ids = tokenizer.encode("one two three")
    assert run(tokenizer, ids, [1], stop=("two",))[1]
    assert not run(tokenizer, ids, [1], stop=("three",))[1]  # the engine's own end came with the same token


def test_the_end_token_counts_but_has_no_text(tokenizer):
    ids = [*tokenizer.encode("hi"), END]
    for skip in (True, False):
        joined, _ = run(tokenizer, ids, [1], end="stop", skip_special_tokens=skip)
        assert (joined.text, joined.token_ids, joined.finish_reason, joined.stop_reason) == ("hi", tuple(ids), "stop", None)


def test_the_last_token_of_a_complete_grammar_has_text(tokenizer):
    choice = Choice(0, SamplingParams(), tokenizer, limit=1)
    ids = tuple(tokenizer.encode("{}"))
    assert not choice.push(TokenOutput(request_id="r", token_ids=ids, finish_reason="stop", ends_in_text=True))
    assert (choice.take().text, choice.finished) == ("{}", True)


def test_a_stop_token_is_left_out_unless_wanted(tokenizer):
    ids = tokenizer.encode("hi!")
    joined, _ = run(tokenizer, ids, [2], end="stop", stop_reason=ids[-1], stop_token_ids=(ids[-1],))
    assert (joined.text, joined.stop_reason, len(joined.token_ids)) == ("hi", ids[-1], 3)
    joined, _ = run(tokenizer, ids, [2], end="stop", stop_reason=ids[-1], stop_token_ids=(ids[-1],), include_stop_str_in_output=True)
    assert joined.text == "hi!"


def test_text_that_was_held_back_comes_at_the_end(tokenizer):
    """A stop string that was begun, and a character that was: both end the text as they stand."""
    ids = [*tokenizer.encode("say STO"), *"🫠".encode()[:2]]
    joined, _ = run(tokenizer, ids, [1], stop=("STOP",))
    assert joined.text == "say STO\ufffd"
    assert run(tokenizer, ids, [1])[0].text == "say STO\ufffd"


def test_without_detokenizing_there_are_tokens_only(tokenizer):
    joined, _ = run(tokenizer, tokenizer.encode("hi"), [1], detokenize=False)
    assert (joined.text, len(joined.token_ids)) == ("", 2)


def test_limit_zero_keeps_the_prompt_scores_alone(tokenizer):
    joined, _ = run(tokenizer, [65], [1], limit=0, end="stop")
    assert (joined.text, joined.token_ids, joined.finish_reason, joined.prompt_logprobs) == ("", (), "length", (score(1),))
