import asyncio

import pytest

from headrace.errors import ContextLengthExceeded, EngineUnavailable, QueueFull, RequestFailed
from tests.patience import eventually
from tests.server.fakes import ANSWER, CONTEXT, World, events, refused


async def test_plain_answer(world: World):
    response = await world.complete(prompt="Hi there", max_tokens=12, model="tiny")
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    assert body["choices"] == [{"index": 0, "text": ANSWER[:10], "logprobs": None, "finish_reason": "length", "stop_reason": None}]
    usage = {"prompt_tokens": 8, "completion_tokens": 12, "total_tokens": 20, "prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == usage


async def test_streams_are_the_plain_answer_in_pieces(world: World):
    fields = {"prompt": ["ab", "cdé"], "n": 2, "max_tokens": 9, "logprobs": 2, "echo": True, "return_token_ids": True}
    world.generator.delay = {2: 0.02}
    world.generator.cached_tokens = 1
    plain = (await world.complete(**fields)).json()
    response = await world.complete(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == plain["usage"]
    assert plain["usage"]["prompt_tokens"] == 6
    assert plain["usage"]["completion_tokens"] == 36
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    for whole in plain["choices"]:
        pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == whole["index"]]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [whole["finish_reason"]]
        assert [token_id for piece in pieces for token_id in piece["token_ids"]] == whole["token_ids"]
        assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        for name, values in whole["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values


async def test_choices_are_in_the_order_of_the_prompts_whoever_ends_first(world: World):
    world.generator.delay = {1: 0.05}
    choices = (await world.complete(prompt=["a", "bb", "ccc"], max_tokens=2, echo=True)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["aH" + "\ufffd", "bbH" + "\ufffd", "cccH" + "\ufffd"]


async def test_echo_with_logprobs_scores_prompt_and_answer(world: World):
    choice = (await world.complete(prompt="aé", max_tokens=3, echo=True, logprobs=1)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aéHé"
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "H", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 3]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, *({token: -0.5} for token in logprobs["tokens"][1:])]


async def test_logprobs_hold_the_token_itself_and_as_many_others_as_asked_for(world: World):
    for count, size in ((0, 1), (1, 1), (3, 3), (20, 20)):
        logprobs = (await world.complete(prompt="a", max_tokens=1, logprobs=count)).json()["choices"][0]["logprobs"]
        assert len(logprobs["top_logprobs"][0]) == size
        assert logprobs["top_logprobs"][0]["H"] == -0.5


async def test_prompt_alone_with_its_scores(world: World):
    body = (await world.complete(prompt="ab", max_tokens=0, echo=True)).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 0
    refused(await world.complete(prompt="ab", max_tokens=0), param="max_tokens")


async def test_echo_of_ids_is_their_text(world: World):
    choice = (await world.complete(prompt=[257, 104, 105], max_tokens=1, echo=True)).json()["choices"][0]
    assert choice["text"] == "</s>hiH"


async def test_prompt_logprobs_are_given_by_id(world: World):
    choice = (await world.complete(prompt="ab", max_tokens=1, prompt_logprobs=2)).json()["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert len(second) == 2
    refused(await world.complete(prompt="ab", prompt_logprobs=1, stream=True), param="prompt_logprobs")


async def test_what_reaches_the_engine(world: World):
    fields = {"top_k": 3, "min_p": 0.1, "seed": 5, "stop": "x", "stop_token_ids": [7], "logit_bias": {"5": -1}, "temperature": 0.5}
    more = {"priority": -3, "session_id": "s", "cache_salt": "c", "deadline_ms": 1000, "bad_words": ["w"], "min_tokens": 1}
    response = await world.complete(prompt=[1, 2], max_tokens=4, n=2, ignore_eos=True, **fields, **more)
    assert response.status_code == 200, response.text
    (request,) = world.generator.requests
    params = request.params
    assert request.prompt_token_ids == (1, 2)
    assert (request.priority, request.session_id, request.cache_salt) == (-3, "s", "c")
    assert request.deadline is not None
    assert (params.top_k, params.min_p, params.seed, params.stop, params.stop_token_ids) == (3, 0.1, 5, ("x",), (7,))
    assert (params.logit_bias, params.n, params.max_tokens, params.min_tokens, params.ignore_eos) == ({5: -1.0}, 2, 4, 1, True)
    assert params.bad_words == ("w",)


async def test_the_last_tokens_of_a_prompt_can_be_kept(world: World):
    assert (await world.complete(prompt="abcdef", max_tokens=1, truncate_prompt_tokens=2)).status_code == 200
    assert world.generator.requests[-1].prompt_token_ids == (101, 102)
    assert (await world.complete(prompt="a" * 5000, max_tokens=1, truncate_prompt_tokens=-1)).status_code == 200
    assert len(world.generator.requests[-1].prompt_token_ids) == CONTEXT - 1
    refused(await world.complete(prompt="abc", truncate_prompt_tokens=0), param="truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("prompt", "limit", "param", "numbers"),
    [
        ("a" * CONTEXT, None, "prompt", [CONTEXT]),
        ([5] * (CONTEXT + 1), 1, "prompt", [CONTEXT, CONTEXT + 1]),
        ("a" * 100, CONTEXT, "max_tokens", [CONTEXT, 100, CONTEXT - 100]),
        ("word " * 5000, None, "prompt", [CONTEXT]),
    ],
)
async def test_what_does_not_fit_is_refused_with_the_numbers(world: World, prompt, limit, param, numbers):
    error = refused(await world.complete(prompt=prompt, max_tokens=limit), param=param, code="context_length_exceeded")
    assert all(str(number) in str(error["message"]) for number in numbers)
    assert not world.generator.requests


async def test_a_default_limit_is_cut_to_what_fits(world: World):
    await world.complete(prompt=[5] * (CONTEXT - 3))
    assert world.generator.requests[-1].params.max_tokens == 3
    await world.complete(prompt=[5])
    assert world.generator.requests[-1].params.max_tokens == 16


@pytest.mark.parametrize(
    "prompt", [None, 5, True, {}, [], [[]], [None], "", [""], ["ok", ""], [1.5], [True], [-1], [259], [2**70], [[1], "x"], ["x", 1]]
)
async def test_bad_prompts_are_refused_by_name(world: World, prompt):
    refused(await world.complete(prompt=prompt, max_tokens=2), param="prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1, "1", True, [], {}, 10**400)),
        *(("max_tokens", value) for value in (-1, 2.5, "3", True, 2**40)),
        *(("n", value) for value in (0, -1, 129, 1.5, "two", 10**30)),
        *(("logprobs", value) for value in (-1, 21, True, "2")),
        *(("prompt_logprobs", value) for value in (-1, 21, True)),
        *(("logit_bias", value) for value in ({"259": 1}, {"x": 1}, {"5": None}, {"5": 101}, {"-1": 1}, {"²": 1}, {"1" * 40: 1}, [1])),
        *(("stop", value) for value in (5, [5], ["a", None], "", [""], {"a": 1}, ["x"] * 65, "x" * 1025, ["x" * 1025])),
        *(("stop_token_ids", value) for value in ([-1], [259], ["x"], 5, [True])),
        *(("allowed_token_ids", value) for value in ([], [259], [1.5])),
        *(("bad_words", value) for value in ([""], [5], "x", ["x"] * 257, ["x" * 1025])),
        *(("cache_salt", value) for value in ("", 5)),
        *(("session_id", value) for value in ("", 7)),
        *(("priority", value) for value in ("high", 1.5, 2**40)),
        *(("deadline_ms", value) for value in (0, -5, "x")),
        *(("top_k", value) for value in (-7, 1.5, 2**40)),
        *(("seed", value) for value in (2**80, "x")),
        *(("stream", value) for value in ("maybe", 1)),
        ("stream_options", {"include_usage": True}),
        ("suffix", "x"),
        ("best_of", 3),
        ("x_unknown", {"deep": [1]}),
        ("metadata", {"a": 1}),
        ("model", 5),
    ],
)
async def test_bad_values_are_refused_by_name(world: World, field, value):
    response = await world.complete(**{"prompt": "hi", field: value})
    error = refused(response)
    assert str(error["param"]).split("[")[0].split(".")[0] == field, error
    assert not world.generator.requests


async def test_min_tokens_above_the_limit_is_refused(world: World):
    refused(await world.complete(prompt="hi", min_tokens=10, max_tokens=5), param="min_tokens")


async def test_every_optional_field_may_be_null(world: World):
    from headrace.server.schema import CompletionBody
    from headrace.server.unsupported import UNSUPPORTED

    names = set(CompletionBody.model_fields) | set(UNSUPPORTED)
    response = await world.complete(**{**dict.fromkeys(names), "prompt": "hi"})
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == (await world.complete(prompt="hi")).json()["choices"]


async def test_fields_that_change_no_answer_are_accepted(world: World):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "best_of": 1,
    }
    assert (await world.complete(prompt="hi", **harmless)).status_code == 200


async def test_unknown_models_are_not_answered_by_another(world: World):
    for stream in (False, True):
        error = refused(await world.complete(prompt="hi", model="nope", stream=stream), 404, param="model", code="model_not_found")
        assert "nope" in str(error["message"])
    assert (await world.complete(prompt="hi", model="other/name")).json()["model"] == "other/name"


async def test_one_body_cannot_fan_out_into_thousands(world: World):
    refused(await world.complete(prompt=["a"] * 1025), param="prompt")
    refused(await world.complete(prompt=["a"] * 100, n=100), param="n")
    assert not world.generator.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull("full", retry_after=7), 429),
        (ContextLengthExceeded("no room in the KV cache", param="prompt"), 400),
        (RequestFailed("non-finite logits"), 500),
        (EngineUnavailable("dead"), 503),
        (RuntimeError("a bug"), 500),
    ],
)
async def test_errors_before_the_first_token_have_their_own_status(world: World, error, status, stream):
    world.generator.error = error
    response = await world.complete(prompt="hi", stream=stream)
    refused(response, status)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if status == 429:
        assert response.headers["retry-after"] == "7"
    assert "a bug" not in response.text
    assert world.generator.open == 0


async def test_a_missed_deadline_is_no_fault_of_the_server(world: World):
    world.generator.error = RequestFailed("too late", code="deadline_exceeded")
    response = await world.complete(prompt="hi", deadline_ms=5)
    refused(response, 429, code="deadline_exceeded")
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("error", [RequestFailed("non-finite logits"), RuntimeError("a bug")])
@pytest.mark.parametrize("n", [1, 3])
async def test_errors_in_a_stream_are_its_last_event(world: World, error, n):
    world.generator.error, world.generator.error_after = error, 4
    response = await world.complete(prompt="hi", stream=True, n=n)
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert last["error"]["type"] == "internal_error"
    assert "a bug" not in last["error"]["message"]
    assert all("error" not in chunk for chunk in chunks)
    assert "[DONE]" not in response.text
    assert world.generator.open == 0


async def test_usage_of_each_chunk(world: World):
    response = await world.complete(prompt="hi", max_tokens=3, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    *chunks, last, _ = events(response.text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3]  # é arrives whole
    assert last["usage"]["completion_tokens"] == 3


async def test_a_full_process_answers_at_once(world: World):
    world.generator.pause = asyncio.Event()
    running = [asyncio.create_task(world.complete(prompt="hi", max_tokens=2)) for _ in range(world.max_requests)]
    await eventually(lambda: world.generator.open == world.max_requests)
    response = await world.complete(prompt="hi")
    refused(response, 429, code="queue_full")
    assert int(response.headers["retry-after"]) >= 1
    world.generator.pause.set()
    assert {response.status_code for response in await asyncio.gather(*running)} == {200}
    assert world.service.admission.active == 0
    assert world.service.bodies.used == 0
