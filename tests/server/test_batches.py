"""/v1/files and /v1/batches over the fake generator."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from headrace.errors import EngineUnavailable, QueueFull
from headrace.jobs import input_file, worker
from headrace.text.tokenizer import Tokenizer
from tests.engine.fake_engine import until
from tests.patience import LIMIT_S
from tests.server.fakes import World, refused

FINISHED = ("completed", "failed", "cancelled", "expired")
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "TICK_S", 0.02)
    monkeypatch.setattr(worker, "PAUSE_S", 0.02)


@pytest.fixture
async def world(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[World]:
    world = World(tokenizer, **{"batch_folder": tmp_path / "batches", **getattr(request, "param", {})})
    yield world
    await world.close()


def line(custom_id: str, url: str = "/v1/completions", **body: object) -> Json:
    body = {"prompt": "Hi", "max_tokens": 4} | body if url == "/v1/completions" else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


async def upload(world: World, content: bytes | list[Json], *, key: str = "", **form: str) -> httpx.Response:
    data = content if isinstance(content, bytes) else "\n".join(json.dumps(item) for item in content).encode()
    fields = {"purpose": "batch"} | form
    return await world.http.post("/v1/files", files={"file": ("in.jsonl", data)}, data=fields, headers=headers(key))


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def create(world: World, lines: list[Json], endpoint: str = "/v1/completions", *, key: str = "", **fields: object) -> Json:
    file = (await upload(world, lines, key=key)).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h", **fields}
    response = await world.http.post("/v1/batches", json=body, headers=headers(key))
    assert response.status_code == 200, response.text
    batch: Json = response.json()
    return batch


async def get(world: World, batch_id: str, key: str = "") -> Json:
    response = await world.http.get(f"/v1/batches/{batch_id}", headers=headers(key))
    assert response.status_code == 200, response.text
    batch: Json = response.json()
    return batch


async def finished(world: World, batch_id: str, key: str = "") -> Json:
    async with asyncio.timeout(LIMIT_S):
        while (batch := await get(world, batch_id, key))["status"] not in FINISHED:  # noqa: ASYNC110 - as a client polls
            await asyncio.sleep(0.01)
    return batch


async def results(world: World, file_id: str | None, key: str = "") -> dict[str, Json]:
    if file_id is None:
        return {}
    response = await world.http.get(f"/v1/files/{file_id}/content", headers=headers(key))
    found = [json.loads(text) for text in response.text.splitlines()]
    assert len({item["id"] for item in found}) == len(found)
    return {item["custom_id"]: item for item in found}


async def test_the_life_of_a_batch(world: World):
    batch = await create(world, [line(f"c{i}", max_tokens=i + 1) for i in range(9)], metadata={"who": "me"})
    assert (batch["object"], batch["status"], batch["errors"], batch["output_file_id"]) == ("batch", "validating", None, None)
    assert batch["expires_at"] == batch["created_at"] + 86_400
    batch = await finished(world, batch["id"])
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 9, "completed": 9, "failed": 0})
    assert (batch["metadata"], batch["error_file_id"]) == ({"who": "me"}, None)
    times = [batch[name] for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at")]
    assert times == sorted(times)
    output = await results(world, batch["output_file_id"])
    assert list(output) == [f"c{i}" for i in range(9)]
    for i in range(9):
        response = output[f"c{i}"]["response"]
        plain = (await world.complete(prompt="Hi", max_tokens=i + 1)).json()
        assert (output[f"c{i}"]["error"], response["status_code"], bool(response["request_id"])) == (None, 200, True)
        assert response["body"]["choices"] == plain["choices"]
        assert response["body"]["usage"] == plain["usage"]
    assert all(request.background for request in world.generator.requests[:9])
    assert {request.tenant for request in world.generator.requests[:9]} == {" background"}
    metrics = (await world.http.get("/metrics")).text
    assert 'headrace_batch_lines_total{outcome="completed"} 9.0' in metrics


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}, "chat.completion"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "list"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}, "response"),
    ],
)
async def test_every_endpoint(world: World, url: str, body: Json, kind: str):
    batch = await finished(world, (await create(world, [line("a", url, **body)], url))["id"])
    output = await results(world, batch["output_file_id"])
    assert output["a"]["response"]["body"]["object"] == kind


async def test_a_bad_line_fails_alone(world: World):
    lines = [line("a"), line("b", temperature=-1), line("c", stream=True), line("d", model="nope"), line("e", prompt="x" * 600)]
    batch = await finished(world, (await create(world, lines))["id"])
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 5, "completed": 1, "failed": 4})
    assert set(await results(world, batch["output_file_id"])) == {"a"}
    errors = {name: item["response"] for name, item in (await results(world, batch["error_file_id"])).items()}
    assert {name: item["status_code"] for name, item in errors.items()} == {"b": 400, "c": 400, "d": 404, "e": 400}
    assert [errors[name]["body"]["error"]["param"] for name in "bcde"] == ["temperature", "stream", "model", "prompt"]


async def test_reading_a_long_file_rests_between_its_parts(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(input_file, "LINES_AT_ONCE", 2)
    assert (await finished(world, (await create(world, [line(f"c{number}") for number in range(5)]))["id"]))["status"] == "completed"
    monkeypatch.setattr(worker, "VALIDATION_REST", 1e6)  # each rest is for minutes
    batch = await create(world, [line(f"c{number}") for number in range(5)])
    await asyncio.sleep(0.2)
    assert (await get(world, batch["id"]))["status"] == "validating"


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"{not json", "invalid_json_line", 1),
        (b"", "empty_file", None),
        (json.dumps(line("a")).encode() + b"\n7", "invalid_request", 2),
        (json.dumps(line("a", "/v1/embeddings", input="x")).encode(), "mismatched_url", 1),
    ],
)
async def test_a_file_that_is_no_batch_fails_with_its_line(world: World, content: bytes, code: str, number: int | None):
    file = (await upload(world, content)).json()
    fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await finished(world, (await world.post("/v1/batches", fields)).json()["id"])
    assert (batch["status"], batch["request_counts"]["total"], batch["failed_at"] is not None) == ("failed", 0, True)
    (fault,) = batch["errors"]["data"]
    assert (fault["code"], fault["line"], bool(fault["message"])) == (code, number, True)
    assert not world.generator.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-nope"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/nope"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "5m"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
async def test_what_is_wrong_with_a_batch_is_named(world: World, fields: Json, param: str):
    file = (await upload(world, [line("a")])).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    refused(await world.post("/v1/batches", body), param=param)


async def test_cancel_keeps_what_is_done_and_frees_the_engine(world: World):
    world.generator.delay = {5: 60.0}
    lines = [line("quick"), *(line(f"slow{i}", prompt="x" * 5) for i in range(20))]
    batch = await create(world, lines)
    await until(lambda: world.generator.open == 4 and len(world.generator.requests) == 5)
    response = await world.http.post(f"/v1/batches/{batch['id']}/cancel")
    assert response.json()["status"] in ("cancelling", "cancelled")
    batch = await finished(world, batch["id"])
    assert (batch["status"], batch["cancelled_at"] >= batch["cancelling_at"]) == ("cancelled", True)
    assert batch["request_counts"] == {"total": 21, "completed": 1, "failed": 0}
    assert set(await results(world, batch["output_file_id"])) == {"quick"}
    assert world.generator.open == 0
    refused(await world.http.post(f"/v1/batches/{batch['id']}/cancel"), code="batch_not_cancellable")


async def test_a_batch_whose_window_ends(world: World, monkeypatch: pytest.MonkeyPatch):
    world.generator.delay = {5: 600.0}
    batch = await create(world, [line("a"), *(line(f"s{i}", prompt="x" * 5) for i in range(9))])
    async with asyncio.timeout(LIMIT_S):
        while (await get(world, batch["id"]))["request_counts"]["completed"] < 1:  # noqa: ASYNC110 - as a client polls
            await asyncio.sleep(0.01)
    monkeypatch.setattr(worker, "time", SimpleNamespace(time=lambda: batch["expires_at"], monotonic=time.monotonic))
    batch = await finished(world, batch["id"])
    assert (batch["status"], batch["expired_at"] is not None, batch["completed_at"]) == ("expired", True, None)
    assert set(await results(world, batch["output_file_id"])) == {"a"}
    errors = await results(world, batch["error_file_id"])
    assert {item["error"]["code"] for item in errors.values()} == {"batch_expired"}
    assert len(errors) == 9
    assert world.generator.open == 0


async def test_lines_in_flight_are_bounded_and_fewer_beside_others(world: World):
    world.generator.pause = asyncio.Event()
    batch = await create(world, [line(f"c{i}") for i in range(12)])
    await until(lambda: world.generator.open == 4)
    await asyncio.sleep(0.1)
    assert world.generator.open == 4
    with world.service.admission.permit():
        world.generator.pause.set()
        await finished(world, batch["id"])
    assert len(world.generator.requests) == 12


async def test_a_line_that_finds_the_engine_away_is_answered_later(world: World):
    world.engine.state = "restarting"
    batch = await create(world, [line("a"), line("b")])
    await asyncio.sleep(0.1)
    assert not world.generator.requests
    world.generator.error = QueueFull("full")
    world.engine.state = "ready"
    await until(lambda: len(world.generator.requests) >= 4)
    world.generator.error = None
    batch = await finished(world, batch["id"])
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_line_that_kills_the_engine_is_given_up(world: World):
    world.generator.error = EngineUnavailable("the engine died")
    batch = await finished(world, (await create(world, [line("a")]))["id"])
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    assert len(world.generator.requests) == 3
    assert (await results(world, batch["error_file_id"]))["a"]["response"]["status_code"] == 503


async def test_what_is_unfinished_goes_on_at_the_next_start(world: World, tokenizer: Tokenizer, tmp_path: Path):
    world.generator.pause = asyncio.Event()
    batch = await create(world, [line(f"c{i}") for i in range(6)])
    await until(lambda: world.generator.open == 4)
    assert world.batches is not None
    world.service.draining = True
    await world.batches.close()
    assert world.generator.open == 0
    refused(await world.http.get("/v1/batches"), 503)
    later = World(tokenizer, batch_folder=tmp_path / "batches")
    assert later.batches is not None
    await later.batches.start(must_open=False)
    ended = await finished(later, batch["id"])
    assert ended["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    assert len(later.generator.requests) == 6
    await later.close()


@pytest.mark.parametrize("world", [{"api_keys": ("one", "two")}], indirect=True)
async def test_a_key_sees_its_own_only(world: World):
    batch = await create(world, [line("a")], key="one")
    batch = await finished(world, batch["id"], "one")
    for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{batch['input_file_id']}", f"/v1/files/{batch['output_file_id']}/content"):
        assert (await world.http.get(path, headers=headers("one"))).status_code == 200
        refused(await world.http.get(path, headers=headers("two")), 404)
        refused(await world.http.get(path), 401)
    refused(await world.http.post(f"/v1/batches/{batch['id']}/cancel", headers=headers("two")), 404)
    refused(await world.http.delete(f"/v1/files/{batch['input_file_id']}", headers=headers("two")), 404)
    for path in ("/v1/batches", "/v1/files"):
        assert (await world.http.get(path, headers=headers("two"))).json()["data"] == []
    body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    refused(await world.http.post("/v1/batches", json=body, headers=headers("two")), param="input_file_id")


async def test_files(world: World):
    file = (await upload(world, b"x\xff\n")).json()
    assert (file["object"], file["bytes"], file["purpose"], file["filename"], file["status"]) == ("file", 3, "batch", "in.jsonl", "processed")
    assert (await world.http.get(f"/v1/files/{file['id']}")).json() == file
    assert (await world.http.get(f"/v1/files/{file['id']}/content")).content == b"x\xff\n"
    second = (await upload(world, b"y")).json()
    listed = (await world.http.get("/v1/files?limit=1&purpose=batch")).json()
    assert ([item["id"] for item in listed["data"]], listed["has_more"], listed["last_id"]) == ([second["id"]], True, second["id"])
    after = (await world.http.get(f"/v1/files?after={second['id']}")).json()
    assert ([item["id"] for item in after["data"]], after["has_more"]) == ([file["id"]], False)
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("limt=5", "limt"), ("limit=1&limit=2", "limit")):
        refused(await world.http.get(f"/v1/files?{query}"), param=param)
    assert (await world.http.delete(f"/v1/files/{file['id']}")).json() == {"id": file["id"], "object": "file", "deleted": True}
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", "/v1/batches/batch_nope", "/v1/files/..%2Flock"):
        refused(await world.http.get(path), 404)
    refused(await upload(world, b"x", purpose="fine-tune"), param="purpose")
    refused(await upload(world, b"x", **{"expires_after[seconds]": "3600"}), param="expires_after[seconds]")
    assert not list((world.batches._folder / "files").glob("*.part"))


@pytest.mark.parametrize("world", [{"max_file_bytes": 100}], indirect=True)
async def test_files_are_bounded_one_by_one_and_together(world: World):
    refused(await upload(world, b"x" * 101), 413, code="body_too_large")
    for _ in range(32):
        assert (await upload(world, b"x" * 100)).status_code == 200
    refused(await upload(world, b"x"), code="storage_full")


async def test_batches_have_pages(world: World):
    ids = [(await create(world, [line("a")]))["id"] for _ in range(3)]
    first = (await world.http.get("/v1/batches?limit=2")).json()
    assert ([item["id"] for item in first["data"]], first["has_more"]) == ([ids[2], ids[1]], True)
    second = (await world.http.get(f"/v1/batches?after={first['last_id']}")).json()
    assert ([item["id"] for item in second["data"]], second["has_more"]) == ([ids[0]], False)
    for batch_id in ids:
        await finished(world, batch_id)


@pytest.mark.parametrize("world", [{"batch_folder": "/proc/nowhere"}], indirect=True)
async def test_a_folder_that_cannot_be_written_is_said(world: World):
    error = refused(await world.http.get("/v1/batches"), 503)
    assert "--batch-dir" in str(error["message"])
    assert (await world.complete(prompt="x", max_tokens=1)).status_code == 200
