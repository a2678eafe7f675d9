"""GET /v1/status: the numbers, and where the time goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.messages import SchedulerStats
from headrace.engine.wire import Heartbeat
from headrace.observe.work import PathWork, Work
from headrace.server.routes_status import status_object, times
from tests.patience import LIMIT_S
from tests.server.fakes import CONTEXT, STATS, World

WORK = Work(paths={"ready": PathWork(steps=50)}, between={"host": 1.0, "waiting": 2.0, "idle": 90.0})
WORK.paths["ready"].seconds |= {"useful": 3.0, "host": 1.0}
RESTING = replace(STATS, num_running=0, num_waiting=0)


def beat(stats: SchedulerStats, *, started: float | None = None) -> Heartbeat:
    return Heartbeat(stats, started, 50, 4.0, 100.0, WORK)


async def test_before_the_engine_has_computed(world: World):
    world.service.loaded, world.engine.stats = None, None
    response = await world.http.get("/v1/status")
    assert response.headers["cache-control"] == "no-store"
    body = response.json()
    assert (body["state"], body["engine"], body["max_model_len"]) == ("starting", None, None)


async def test_the_numbers(world: World):
    world.engine.heartbeat = beat(STATS)
    world.engine.stats = replace(STATS, num_evictable_blocks=3, prompt_tokens_total=11, generation_tokens_total=22)
    await world.complete(prompt="abc", max_tokens=2)
    body = (await world.http.get("/v1/status")).json()
    assert (body["model"], body["state"], body["max_model_len"], body["max_num_seqs"]) == ("tiny", "ready", CONTEXT, 16)
    assert body["first_tokens_total"] == 1
    assert 0 <= body["first_token_seconds_total"] < LIMIT_S
    engine = body["engine"]
    assert (engine["running"], engine["waiting"], engine["swapped"]) == (1, 2, 0)
    assert engine["kv_blocks"] == {"total": 10, "used": 6, "cached": 3, "free": 1}
    assert (engine["prompt_tokens_total"], engine["generation_tokens_total"], engine["preemptions_total"]) == (11, 22, 3)


@pytest.mark.parametrize(
    ("heartbeat", "at", "runner", "idle"),
    [
        (beat(STATS), 100.0, 4.0, 90.0),  # work, but no step: up to the heartbeat, as nothing is known of later
        (beat(STATS, started=98.5), 100.0, 5.5, 90.0),  # the step that runs counts as far as it has come
        (beat(RESTING), 107.0, 4.0, 97.0),  # at rest no heartbeat comes, and all the time since is idle
        (beat(RESTING, started=99.0), 100.0, 5.0, 90.0),  # the last step runs, though its requests were aborted
        (beat(replace(RESTING, num_swapped=1)), 100.0, 4.0, 90.0),
    ],
)
def test_where_the_time_goes(heartbeat: Heartbeat, at: float, runner: float, idle: float) -> None:
    found = times(heartbeat, now=107.0)
    assert {name: found[name] for name in ("at", "steps_total", "runner_seconds_total", "idle_seconds_total")} == {
        "at": at,
        "steps_total": 50,
        "runner_seconds_total": runner,
        "idle_seconds_total": idle,
    }
    assert {kind: seconds for kind, seconds in found["work_seconds_total"].items() if seconds} == {
        "useful": 3.0,
        "host": 2.0,
        "waiting": 2.0,
        "idle": idle,
    }
    assert [remark["kind"] for remark in found["remarks"]] == ["host", "waiting"]


async def test_a_dead_engine_has_no_numbers(world: World):
    world.engine.state = "restarting"
    body = status_object(world.service, 1.0)
    assert (body["state"], body["engine"]) == ("restarting", None)


async def test_the_document_tells_the_truth(world: World):
    schemas = (await world.http.get("/openapi.json")).json()["components"]["schemas"]
    world.engine.heartbeat = beat(STATS)
    body = (await world.http.get("/v1/status")).json()
    assert set(body) == set(schemas["Status"]["required"])
    assert set(body["engine"]) == set(schemas["Status"]["properties"]["engine"]["anyOf"][0]["required"])
