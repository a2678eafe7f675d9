"""How things stand in numbers, for pages that draw them: state, queue, batch, KV blocks, and where the time goes."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace import __version__
from headrace.core.messages import SchedulerStats
from headrace.engine.wire import Heartbeat
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


def times(heartbeat: Heartbeat, now: float) -> dict[str, Any]:
    """Where the wall time went up to `at`: what is neither the runner's nor idle went into work around the steps."""
    stats, started = heartbeat.stats, heartbeat.step_started
    at, idle = heartbeat.at, heartbeat.idle_seconds_total
    if started is None and not stats.num_running + stats.num_waiting + stats.num_swapped:  # no heartbeat comes until there is work
        idle += max(0.0, now - at)
        at = max(at, now)
    running = 0.0 if started is None else max(0.0, at - started)
    return {
        "at": at,
        "steps_total": heartbeat.steps_total,
        "runner_seconds_total": heartbeat.step_seconds_total + running,
        "idle_seconds_total": idle,
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
