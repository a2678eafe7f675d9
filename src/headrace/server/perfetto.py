"""A trace in the JSON form that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from headrace.core.messages import Kernel
from headrace.engine.trace import Trace
from headrace.engine.wire import StepTrace

ENGINE, REQUESTS, KERNELS = 1, 2, 3  # process ids of the picture
LOOP, RUNNER = 1, 2  # rows of the engine

Event = dict[str, Any]


def trace_object(trace: Trace, *, model: str) -> dict[str, Any]:
    """Groups: the engine, with its loop and its runner; one row for each request; where asked for, one for each track of kernels.

    Times are microseconds from the trace's begin, which is told in seconds of the machine's monotonic clock.
    """
    picture = _Picture(trace)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"model": model, "begin": trace.begin, "seconds": trace.end - trace.begin, "complete": not trace.is_full},
        "traceEvents": [*picture.names(), *picture.events],
    }


class _Picture:
    def __init__(self, trace: Trace) -> None:
        self._begin = trace.begin
        self._rows: dict[str, int] = {}  # of each request
        self._tracks: dict[tuple[str, int], int] = {}  # of kernels
        self.events: list[Event] = []
        first_step: dict[str, float] = {}
        for step in trace.steps:
            self._step(step)
            for row in step.rows:
                first_step.setdefault(row.request_id, step.started)
        for request_id, arrival in trace.arrivals.items():
            begun = first_step.get(request_id)
            self._slice("queued", REQUESTS, self._row(request_id), arrival, trace.end if begun is None else begun)
        for kernel in trace.kernels or ():
            self._kernel(kernel)
        for output in trace.outputs:
            name = f"{output.num_tokens} tokens" if output.finish_reason is None else f"end: {output.finish_reason}"
            self.events.append(
                {"name": name, "ph": "i", "s": "t", "pid": REQUESTS, "tid": self._row(output.request_id), "ts": self._microseconds(output.at)}
            )

    def _kernel(self, kernel: Kernel) -> None:
        row = self._tracks.setdefault((kernel.device, kernel.track), len(self._tracks) + 1)
        self._slice(kernel.name, KERNELS, row, kernel.begin, kernel.end)

    def names(self) -> list[Event]:
        named = [(ENGINE, None, "Engine"), (ENGINE, LOOP, "Loop: plan, update"), (ENGINE, RUNNER, "Runner: steps"), (REQUESTS, None, "Requests")]
        named += [(REQUESTS, row, request_id) for request_id, row in self._rows.items()]
        if self._tracks:
            named.append((KERNELS, None, "Kernels"))
        named += [(KERNELS, row, f"{device}: {'thread' if device == 'cpu' else 'stream'} {track}") for (device, track), row in self._tracks.items()]
        return [
            {"name": "process_name" if row is None else "thread_name", "ph": "M", "pid": group, "tid": row or 0, "args": {"name": name}}
            for group, row, name in named
        ]

    def _step(self, step: StepTrace) -> None:
        num_tokens = sum(row.num_tokens for row in step.rows)
        num_decode = sum(row.is_decode for row in step.rows)
        args = {
            "rows": len(step.rows),
            "decode rows": num_decode,
            "tokens": num_tokens,
            "path": step.path,
            "padding": step.padded_tokens,
            "model ms": round(step.model_seconds * 1e3, 3),
        }
        self._slice(f"plan {step.step_id}", ENGINE, LOOP, step.plan_begin, step.plan_end)
        self._slice(f"step {step.step_id}: {len(step.rows)} rows, {num_tokens} tokens", ENGINE, RUNNER, step.started, step.ended, args)
        self._slice(f"update {step.step_id}", ENGINE, LOOP, step.ended, step.updated)
        for row in step.rows:
            name = "decode" if row.is_decode else f"prefill {row.num_tokens}"
            place = {"step": step.step_id, "position": row.start, "tokens": row.num_tokens, "guesses": row.num_speculated}
            self._slice(name, REQUESTS, self._row(row.request_id), step.started, step.ended, place)

    def _row(self, request_id: str) -> int:
        return self._rows.setdefault(request_id, len(self._rows) + 1)

    def _slice(self, name: str, group: int, row: int, begin: float, end: float, args: dict[str, Any] | None = None) -> None:
        event: Event = {
            "name": name,
            "ph": "X",
            "pid": group,
            "tid": row,
            "ts": self._microseconds(begin),
            "dur": round(max(0.0, end - begin) * 1e6, 1),
        }
        self.events.append(event if args is None else event | {"args": args})

    def _microseconds(self, at: float) -> float:
        return round((at - self._begin) * 1e6, 1)
