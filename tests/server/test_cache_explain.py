"""/v1/cache/explain: both methods, what is refused, and the way to a real engine and back."""

import httpx
import pytest

from tests.core.test_explain import serve as serve_prompt
from tests.patience import LIMIT_S
from tests.server.fakes import World, refused, write_model
from tests.server.test_serve import Process

PATH = "/v1/cache/explain"
KEYS = {"api_keys": ("sk-a", "sk-b")}


async def test_the_answer_of_both_methods(world: World):
    serve_prompt(world.engine.kv, list(b"hello world!"))
    expected = {
        "object": "cache.explanation",
        "model": "tiny",
        "num_tokens": 12,
        "block_size": 4,
        "cached_blocks": 1,
        "cached_tokens": 4,
        "first_missing_block": 1,
        "reason": "never_seen",
        "first_difference": {"position": 6, "cached": {"id": 119, "token": "w"}, "prompt": {"id": 87, "token": "W"}},
        "evicted_seconds_ago": None,
        "awaited_tokens": None,
    }
    answers = [
        await world.post(PATH, {"prompt": "hello World!"}),
        await world.post(PATH, {"prompt": list(b"hello World!"), "model": "tiny"}),
        await world.http.get(PATH, params={"prompt": "hello World!"}),
        await world.http.request("GET", PATH, json={"prompt": "hello World!"}),
    ]
    for response in answers:
        assert response.status_code == 200, response.text
        body = response.json()
        assert body.pop("message")
        assert body == expected
    whole = (await world.post(PATH, {"prompt": "hello world!"})).json()
    assert (whole["reason"], whole["first_missing_block"], whole["cached_tokens"]) == ("cached", None, 11)
    assert (await world.http.get(PATH, params={"prompt": "hello world!", "cache_salt": "s"})).json()["reason"] == "other_salt"


async def test_messages_are_asked_for_as_a_chat_sends_them(world: World):
    serve_prompt(world.engine.kv, list(b"[user]Hi[assistant]"))
    body = (await world.post(PATH, {"messages": [{"role": "user", "content": "Hi"}]})).json()
    assert (body["num_tokens"], body["reason"]) == (19, "cached")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "x", "max_tokens": 5}, "max_tokens"),
    ],
)
async def test_refused_by_name(world: World, body, param):
    refused(await world.post(PATH, body), param=param)


async def test_a_field_may_stand_once_in_the_query(world: World):
    refused(await world.http.get(PATH + "?prompt=a&prompt=b"))
    refused(await world.http.get(PATH), param="prompt")
    refused(await world.http.get(PATH + "?prompt=a&model=nope"), 404, param="model")
    world.engine.state = "restarting"
    refused(await world.http.get(PATH + "?prompt=a"), 503)


@pytest.mark.parametrize("world", [KEYS], indirect=True)
async def test_a_key_is_asked_for_and_tells_whose_words_are_shown(world: World):
    refused(await world.post(PATH, {"prompt": "hello"}), 401)

    async def ask(key: str) -> dict:
        return (await world.post(PATH, {"prompt": "hello World!"}, headers={"Authorization": f"Bearer {key}"})).json()

    await world.complete(prompt="x", max_tokens=1)
    tenants = {}
    for key in ("sk-a", "sk-b"):
        await world.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"Authorization": f"Bearer {key}"})
        tenants[key] = world.generator.requests[-1].tenant
    serve_prompt(world.engine.kv, list(b"hello world!"), tenant=tenants["sk-a"])
    mine, other = await ask("sk-a"), await ask("sk-b")
    assert mine["first_difference"]["position"] == 6
    assert other["first_difference"] is None
    assert mine["cached_tokens"] == other["cached_tokens"] == 4


def test_a_real_engine_answers(tmp_path):
    process = Process(write_model(tmp_path))
    try:
        process.wait_ready()
        prompt = "a prompt of more than two blocks of sixteen tokens"
        url = process.url + PATH
        before = httpx.get(url, params={"prompt": prompt}, timeout=LIMIT_S, trust_env=False).json()
        assert process.complete(prompt=prompt).status_code == 200
        after = httpx.post(url, json={"prompt": prompt}, timeout=LIMIT_S, trust_env=False).json()
        usage = process.complete(prompt=prompt).json()["usage"]
        assert (before["reason"], before["cached_tokens"]) == ("never_seen", 0)
        assert (after["reason"], after["cached_tokens"]) == ("cached", usage["prompt_tokens_details"]["cached_tokens"])
        assert after["cached_tokens"] == len(prompt) // 16 * 16
    finally:
        process.kill()
