"""What is refused before it reaches the engine, and what the engine gets."""

import pytest

from headrace.config import EngineInfo
from headrace.engine.engine_requests import GenerationRequest, bad_words_ids, engine_requests
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import END

INFO = EngineInfo(
    model="fake",
    max_model_len=100,
    vocab_size=259,
    embedding_size=8,
    num_blocks=10,
    block_size=16,
    dtype="float32",
    device="none",
    threads=1,
    path="fake",
    kv_cache_dtype="float32",
    kv_bytes=0,
    weight_bytes=0,
    load_seconds=0.0,
)


def ask(tokenizer, *, prompt=(1, 2, 3), others=None, **params):
    request = GenerationRequest(request_id="r", prompt_token_ids=prompt, params=SamplingParams(**params), **(others or {}))
    return engine_requests(request, INFO, tokenizer)


@pytest.mark.parametrize(("asked", "given"), [(None, 97), (5, 5), (97, 97), (98, 97), (10**6, 97), (0, 1)])
def test_limits_are_resolved(tokenizer, asked, given):
    assert ask(tokenizer, max_tokens=asked)[0].params.max_tokens == given


def test_the_prompt_must_leave_room_for_one_token(tokenizer):
    assert ask(tokenizer, prompt=(1,) * 99, max_tokens=5)[0].params.max_tokens == 1
    for length in (100, 101, 5000):
        with pytest.raises(ContextLengthExceeded, match=f"{length} tokens.*100") as caught:
            ask(tokenizer, prompt=(1,) * length)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prompt", {"prompt": (1, 259)}),
        ("prompt", {"prompt": (-1,)}),
        ("prompt", {"prompt": ()}),
        ("logit_bias", {"logit_bias": {259: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": (3, 10**9)}),
        ("stop_token_ids", {"stop_token_ids": (-2,)}),
        ("bad_words_ids", {"bad_words_ids": ((1,), (2, 300))}),
        ("stop", {"stop": ("x",), "detokenize": False}),
        ("min_tokens", {"max_tokens": None, "min_tokens": 98}),
        ("priority", {"others": {"priority": 2**63}}),
        ("deadline", {"others": {"deadline": float("nan")}}),
        ("session_id", {"others": {"session_id": "\udc00"}}),
        ("cache_salt", {"others": {"cache_salt": "\udc00"}}),
        ("tenant", {"others": {"tenant": "\udc00"}}),
    ],
)
def test_wrong_values_are_refused_by_name(tokenizer, name, values):
    with pytest.raises(InvalidRequest) as caught:
        ask(tokenizer, **values)
    assert caught.value.param == name
    assert name.replace("prompt", "rompt") in str(caught.value).replace("Prompt", "prompt")


def test_choices_are_forks_of_the_first(tokenizer):
    first, second, third = ask(tokenizer, n=3, seed=5, prompt_logprobs=1, others={"session_id": "s", "cache_salt": "x", "tenant": "t", "priority": 2})
    assert [add.request_id for add in (first, second, third)] == ["r", "r-1", "r-2"]
    assert [add.fork_of for add in (first, second, third)] == [None, "r", "r"]
    assert [add.params.choice_index for add in (first, second, third)] == [0, 1, 2]
    assert [add.params.prompt_logprobs for add in (first, second, third)] == [1, None, None]
    assert [add.session_id for add in (first, second, third)] == ["s", None, None]
    assert {(add.cache_salt, add.tenant, add.priority, add.arrival) for add in (first, second, third)} == {("x", "t", 2, first.arrival)}


def test_end_tokens(tokenizer):
    assert ask(tokenizer)[0].eos_token_ids == (END,)
    assert ask(tokenizer, ignore_eos=True)[0].eos_token_ids == ()


def test_text_stays_here(tokenizer):
    """Stop strings and bad words are text; the engine knows ids."""
    params = ask(tokenizer, stop=("\ud800",), bad_words=("no",))[0].params
    assert (params.stop, params.bad_words) == ((), ())
    assert params.bad_words_ids == (tuple(b"no"), tuple(b" no"))


def test_bad_words_with_and_without_the_space(tokenizer):
    assert set(bad_words_ids((" ab", "c"), tokenizer)) == {tuple(b" ab"), tuple(b"ab"), tuple(b"c"), tuple(b" c")}
    assert bad_words_ids((" ",), tokenizer) == (tuple(b" "),)
    assert bad_words_ids(("</s>",), tokenizer)[0] == tuple(b"</s>")  # the text of a control token is text
