"""Routes without generation, keys, CORS, request ids, methods."""

import logging
from typing import Any

import pytest

from tests.server.fakes import CONTEXT, World, refused

KEY = "sk-a-1"
ORIGIN = "http://app.example"
SECURED = {"api_keys": (KEY, "sk-b-2"), "allowed_origins": (ORIGIN,)}
secured = pytest.mark.parametrize("world", [SECURED], indirect=True)
AUTH = {"Authorization": f"Bearer {KEY}"}


async def test_models(world: World):
    body = (await world.http.get("/v1/models")).json()
    assert [model["id"] for model in body["data"]] == ["tiny", "other/name"]
    for model in body["data"]:
        assert (await world.http.get(f"/v1/models/{model['id']}")).json() == model
        assert model["max_model_len"] == CONTEXT
    refused(await world.http.get("/v1/models/nope"), 404, code="model_not_found")


async def test_tokenize_and_back(world: World):
    body = (await world.post("/tokenize", {"prompt": "hé</s>", "return_token_strs": True})).json()
    assert body["tokens"] == [104, 195, 169, 257]
    assert (body["count"], body["max_model_len"]) == (4, CONTEXT)
    assert body["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert (await world.post("/detokenize", {"tokens": body["tokens"]})).json() == {"prompt": "hé</s>"}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert (await world.post("/tokenize", chat)).json()["tokens"] == list(b"[user]x[assistant]")
    assert (await world.post("/tokenize", {**chat, "add_generation_prompt": False})).json()["tokens"] == list(b"[user]x")
    assert (await world.post("/tokenize", {"prompt": "word " * 10_000})).json()["count"] == 50_000
    assert (await world.post("/tokenize", {"prompt": ""})).json()["tokens"] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "nope"}, "model"),
        ("/detokenize", {}, "tokens"),
        *(("/detokenize", {"tokens": tokens}, "tokens") for tokens in (5, None, [-1], [259], ["a"], [1.5], [True])),
    ],
)
async def test_tokenize_refuses_by_name(world: World, path, body, param):
    refused(await world.post(path, body), 404 if param == "model" else 400, param=param)


async def test_life_and_readiness_follow_the_engine(world: World):
    for state, health, ready in (("ready", 200, 200), ("restarting", 200, 503), ("starting", 200, 503), ("dead", 503, 503)):
        world.engine.state = state
        assert (await world.http.get("/health")).status_code == health
        assert (await world.http.get("/ready")).status_code == ready
        if state != "ready":
            for response in (await world.complete(prompt="x"), await world.chat(), await world.http.get("/v1/models")):
                refused(response, 503, code="engine_unavailable")
                assert response.headers["retry-after"] == "1"
    world.engine.state, world.service.draining = "ready", True
    assert (await world.http.get("/ready")).status_code == 503
    refused(await world.complete(prompt="x"), 503)
    world.service.draining, world.service.loaded = False, None
    assert (await world.http.get("/ready")).status_code == 503
    refused(await world.complete(prompt="x"), 503)


async def test_version_and_metrics(world: World):
    assert (await world.http.get("/version")).json()["version"][0].isdigit()
    await world.complete(prompt="abc", max_tokens=4)
    text = (await world.http.get("/metrics")).text
    for line in ("prompt_tokens_total", "generation_tokens_total"):
        assert f'headrace_{line}{{model_name="tiny"}} {3.0 if line.startswith("prompt") else 4.0}' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'headrace_http_requests_total{outcome="2xx",path="/v1/completions"} 1.0' in text


async def test_names_from_clients_make_no_series(world: World):
    async def series() -> set[str]:
        return {line.rpartition(" ")[0] for line in (await world.http.get("/metrics")).text.splitlines()}

    before = await series()
    for junk in ('x"\n\\', "é", "y" * 500):
        await world.complete(prompt="x", model=junk, max_tokens=1)
        await world.http.get(f"/v1/models/{junk!r}")
        await world.http.get(f"/nope/{junk!r}")
        await world.http.request("PUT", "/nope")
    await world.complete(prompt="x", max_tokens=1)
    assert await series() == before


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", "/health", "GET"),
        ("GET", "/tokenize", "POST"),
    ],
)
async def test_wrong_methods_are_told_the_right_one(world: World, method, path, allowed):
    response = await world.http.request(method, path)
    refused(response, 405, code="method_not_allowed")
    assert allowed in response.headers["allow"]


async def test_options_and_head(world: World):
    response = await world.http.options("/v1/completions")
    assert response.status_code == 204
    assert response.headers["allow"] == "POST, OPTIONS"
    assert (await world.http.head("/v1/models")).status_code == 200
    refused(await world.http.options("/nope"), 404)


@pytest.mark.parametrize("path", ["/", "/v1/nope", "/v1/completions/", "//v1/completions", "/V1/completions", "/health/", "/v1/embedding"])
async def test_other_paths_do_not_exist(world: World, path):
    refused(await world.http.post(f"http://test{path}", json={}), 404, code="not_found")


PATHS = ["/v1/models", "/v1/models/x", "/v1/completions", "/v1/responses", "/nope", "/", "/metrics", "/version", "/tokenize"]
ODD_PATHS = ["//health", "/health/", "/HEALTH", "/health/../v1/models", "/ready//", "/health%00", "/health\x00", "/v1/../health", ""]
BAD_KEYS = [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, f"Bearer{KEY}"]


async def answer_to(world: World, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
    """Status and body for a scope as it is: an HTTP client would tidy up the path."""
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await world.app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@secured
@pytest.mark.parametrize("path", [*PATHS, *ODD_PATHS])
@pytest.mark.parametrize("value", BAD_KEYS)
async def test_every_path_but_the_probes_needs_a_key(world: World, path, value):
    headers = [] if value is None else [(b"authorization", value.encode())]
    for method in ("GET", "POST", "OPTIONS"):
        status, body = await answer_to(world, method, path, headers)
        assert status == 401
        assert b"invalid_api_key" in body
        assert KEY.encode() not in body


@secured
async def test_each_key_opens_and_names_its_tenant(world: World):
    for key in SECURED["api_keys"]:
        response = await world.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"Authorization": f"bearer {key}"})
        assert response.status_code == 200
    tenants = [request.tenant for request in world.generator.requests]
    assert len(set(tenants)) == 2
    assert not any(key in tenant for tenant in tenants for key in SECURED["api_keys"])
    for path in ("/health", "/ready"):
        assert (await world.http.get(path)).status_code == 200
    two = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer wrong")]
    refused(await world.http.get("/v1/models", headers=two), 401)


@secured
async def test_pages_of_allowed_origins(world: World):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    good = await world.http.options("/v1/chat/completions", headers={"Origin": ORIGIN, **asked})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in good.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(good.headers["access-control-allow-headers"].lower().replace(" ", "").split(","))
    evil = await world.http.options("/v1/chat/completions", headers={"Origin": "http://evil.example", **asked})
    assert evil.status_code >= 400
    assert "access-control-allow-origin" not in evil.headers
    refusal = await world.http.post("/v1/chat/completions", json={}, headers={"Origin": ORIGIN})
    refused(refusal, 401)
    assert refusal.headers["access-control-allow-origin"] == ORIGIN
    fault = await world.http.post("/v1/chat/completions", json={}, headers={"Origin": ORIGIN, **AUTH})
    refused(fault, 400)
    assert fault.headers["access-control-allow-origin"] == ORIGIN


async def test_request_ids_come_back(world: World):
    async def given(value: str | None) -> str:
        headers = {} if value is None else {"X-Request-Id": value}
        return (await world.http.post("/v1/completions", json={"prompt": []}, headers=headers)).headers["x-request-id"]

    assert await given("abc-123") == "abc-123"
    made = {await given(None), await given(None), await given("a b"), await given("x" * 129)}
    assert len(made) == 4
    assert all(len(value) == 32 for value in made)


@pytest.mark.parametrize("world", [{"log_requests": True}], indirect=True)
async def test_requests_are_logged_in_one_line_each(world: World, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="headrace.access"):
        await world.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}, headers={"X-Request-Id": "id-1"})
        await world.http.get("/nope%0aFORGED")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("POST '/v1/completions' 200 ")
    assert first.endswith("id=id-1 prompt_tokens=3 completion_tokens=2")
    assert "\n" not in second


@pytest.mark.parametrize("world", [{"max_body_bytes": 100}], indirect=True)
async def test_a_body_too_large(world: World):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        response = await world.http.post(path, content=b"x" * 101)
        refused(response, 413, code="body_too_large")
        assert response.headers["connection"] == "close"
    assert world.service.bodies.used == 0
