"""How things stand in numbers, for pages that draw them: state, queue, batch, KV blocks, and where the time goes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace import __version__
from headrace.core.messages import SchedulerStats
from headrace.engine.wire import Heartbeat
from headrace.observe.remarks import remarks
from headrace.observe.work import Work
from headrace.server.service import Service


def status_object(service: Service, now: float) -> dict[str, Any]:
    """Names that end in `_total` count up; rates are differences of two answers over the difference of their `at`.

    `engine` is null while there is no engine, or none that has computed anything.
    """
    engine, stats = service.engine, service.engine.stats
    metrics, model = service.metrics, service.loaded
    return {
        "object": "status",
        "version": __version__,
        "model": service.model_names[0],
        "state": service.state,
        "max_model_len": None if model is None else model.info.max_model_len,
        "max_num_seqs": engine.config.max_num_seqs,
        "engine_restarts_total": engine.restarts_total,
        "first_tokens_total": metrics.first_tokens_total,
        "first_token_seconds_total": metrics.first_token_seconds_total,
        "engine": None if stats is None or engine.heartbeat is None else {**times(engine.heartbeat, now), **counts(stats)},
    }


def resting(heartbeat: Heartbeat) -> bool:
    """Nothing is to be done, so no heartbeat comes until there is work."""
    stats = heartbeat.stats
    return heartbeat.step_started is None and not stats.num_running + stats.num_waiting + stats.num_swapped


def work_until(heartbeat: Heartbeat, now: float) -> Work:
    """What the time went into, up to the heartbeat or, at rest, up to now."""
    if not resting(heartbeat):
        return heartbeat.work
    between = heartbeat.work.between
    return replace(heartbeat.work, between=between | {"idle": between["idle"] + max(0.0, now - heartbeat.at)})


def times(heartbeat: Heartbeat, now: float) -> dict[str, Any]:
    """Where the wall time went up to `at`. Of the step that runs it is not known yet what it is for: `work_seconds_total` is without it."""
    started = heartbeat.step_started
    at = max(heartbeat.at, now) if resting(heartbeat) else heartbeat.at
    work = work_until(heartbeat, at)
    running = 0.0 if started is None else max(0.0, at - started)
    return {
        "at": at,
        "steps_total": heartbeat.steps_total,
        "runner_seconds_total": heartbeat.step_seconds_total + running,
        "idle_seconds_total": work.between["idle"],
        "work_seconds_total": work.seconds,
        "work_paths": {
            name: {"steps_total": path.steps, "tokens_total": path.tokens, "seconds_total": path.seconds} for name, path in work.paths.items()
        },
        "remarks": [{"kind": remark.kind, "share": remark.share, "text": remark.text} for remark in remarks(work)],
    }


def counts(stats: SchedulerStats) -> dict[str, Any]:
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "swapped": stats.num_swapped,
        "kv_blocks": {
            "total": stats.num_blocks,
            "used": stats.num_blocks - stats.num_free_blocks,
            "cached": stats.num_evictable_blocks,
            "free": stats.num_free_blocks - stats.num_evictable_blocks,
        },
        "prompt_tokens_total": stats.prompt_tokens_total,
        "generation_tokens_total": stats.generation_tokens_total,
        "prefix_query_tokens_total": stats.prefix_query_tokens_total,
        "prefix_hit_tokens_total": stats.prefix_hit_tokens_total,
        "preemptions_total": stats.preemptions_recompute_total + stats.preemptions_swap_total,
        "recomputed_tokens_total": stats.recomputed_tokens_total,
    }


def routes(service: Service) -> list[Route]:
    async def status(request: Request) -> Response:
        return JSONResponse(status_object(service, time.monotonic()), headers={"Cache-Control": "no-store"})

    return [Route("/v1/status", status, methods=["GET"])]
