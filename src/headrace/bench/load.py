"""Sends requests at their moments, at most so many at a time, and collects what became of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.sse_client import Record, Target
from headrace.bench.workload import BenchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a load: its records, in the order of the requests, and its wall time in seconds."""

    records: tuple[Record, ...]
    seconds: float


def body_of(request: BenchRequest, *, model: str, chat: bool, extra: dict[str, Any]) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": request.prompt}]} if chat else {"prompt": request.prompt}
    return {
        "model": model,
        **asked,
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    moments: Sequence[float],
    *,
    model: str,
    max_concurrency: int | None = None,
    extra: dict[str, Any] | None = None,
    timeout: float = 6 * 3600.0,
    on_end: Callable[[Record], None] = lambda record: None,
) -> Run:
    """`moments`: seconds after the start, ascending, one for each request. A request that finds `max_concurrency` others waits for one to end,
    and its time counts from when it is sent, as in `vllm bench serve`. `extra`: fields for every body, null ones leave their field out."""
    limit = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    gc.collect()
    gc.freeze()  # a collection while bytes arrive looks at what the run has made alone
    begin = time.monotonic()

    async def one(request: BenchRequest) -> Record:
        async with limit:
            body = body_of(request, model=model, chat=target.is_chat, extra=extra or {})
            record = await target.stream({name: value for name, value in body.items() if value is not None}, timeout=timeout)
        on_end(record)
        return record

    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for request, moment in zip(requests, moments, strict=True):
                if (wait := begin + moment - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(request)))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        gc.unfreeze()
    return Run(records=tuple(task.result() for task in tasks), seconds=time.monotonic() - begin)
