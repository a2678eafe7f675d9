"""Measures a running server's steps while it serves.

Requests like the trace's come in closed loops of more and more clients, who then stop, and `/debug/trace` tells what the engine did. So steps
are timed in service, with HTTP, tokenising and the load itself on the same machine, because that is what a step of a service takes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.load import body_of
from headrace.bench.sse_client import Record, Target
from headrace.bench.workload import BenchRequest
from headrace.core.step_work import StepWork
from headrace.errors import StartError
from headrace.plan.costs import Sample

LEVEL_S = 5.0  # of each number of clients
ALONE_LEVELS = 2.0  # times as long with one
ALONE_RESTS_S = (0.0, 0.03, 0.0, 0.15, 0.0, 0.5)  # before its requests in turn: a step after a pause takes longer
FULL_LEVELS = 3  # with all of them: first their prompts come, then what a full service does
ALONE_OUTPUT = 6  # tokens of an answer then
WARM_UP = 2  # requests
MOST_POINTS = 400  # that the delay of each prompt token is taken from
LONGEST_HANDOFF_S = 0.005  # a longer gap between two steps was a wait for work
ENGINE, REQUESTS, RUNNER = 1, 2, 2  # process and thread ids of server.perfetto

Recording = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    samples: tuple[Sample, ...]
    handoff_s: float
    before_s: float
    before_token_s: float
    after_s: float


def levels(max_num_seqs: int) -> list[int]:
    """Numbers of clients: 1, 2, 4, ... and as many as the engine runs at once."""
    return [*itertools.takewhile(lambda count: count < max_num_seqs, (2**power for power in range(16))), max_num_seqs]


def measure(
    target: Target,
    record: Callable[[float], Recording],
    requests: Iterator[BenchRequest],
    *,
    model: str,
    clients: Sequence[int],
    level_s: float = LEVEL_S,
    on_level: Callable[[], None] = lambda: None,
) -> Measurement:
    """`record`: what `POST /debug/trace?seconds=` answers. `requests`: never end, and no two prompts are alike but for
    what the trace's share: the prefix cache would answer them. Numbers of `clients` are ascending.
    """
    recordings, records = asyncio.run(_Loops(target, record, requests, model).run(clients, level_s, on_level))
    samples = [sample for recording in recordings for sample in samples_of(recording)]
    before, before_token, after = delays_of(recordings, records)
    gaps = [gap for recording in recordings for gap in handoffs(recording)]
    return Measurement(
        samples=tuple(samples),
        handoff_s=statistics.median(gaps) if gaps else 0.0,
        before_s=before,
        before_token_s=before_token,
        after_s=after,
    )


class _Loops:
    """Clients that each send a request when their last one has ended. They become more while the load goes on, so that steps are also those of a
    service in full swing, and end with the answers that are under way: these give steps without prompts, of fewer and fewer rows.
    """

    def __init__(self, target: Target, record: Callable[[float], Recording], requests: Iterator[BenchRequest], model: str) -> None:
        self._target, self._record, self._requests, self._model = target, record, requests, model
        self._tasks: list[asyncio.Task[None]] = []
        self._alone = True
        self._ending = False
        self._records: list[Record] = []

    async def run(self, clients: Sequence[int], level_s: float, on_level: Callable[[], None]) -> tuple[list[Recording], list[Record]]:
        """The recordings, and the records of all requests but those that warmed up."""
        for _ in range(WARM_UP):
            await self._send()
        self._records.clear()
        try:
            self._tasks.append(asyncio.create_task(self._client()))
            recordings = [await self._recorded(level_s * ALONE_LEVELS)]
            self._alone = False
            on_level()
            for count in clients[1:]:
                self._tasks += [asyncio.create_task(self._client()) for _ in range(count - len(self._tasks))]
                recordings.append(await self._recorded(level_s * (FULL_LEVELS if count == clients[-1] else 1)))
                on_level()
            self._ending = True
            recordings.append(await self._recorded(level_s))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return recordings, self._records

    async def _recorded(self, seconds: float) -> Recording:
        found = await asyncio.to_thread(self._record, seconds)
        for task in self._tasks:
            if task.done():
                task.result()  # why a loop ended, if it failed
        return found

    async def _client(self) -> None:
        rests = itertools.cycle(ALONE_RESTS_S)
        while not self._ending:
            if self._alone:
                await asyncio.sleep(next(rests))
            self._records.append(await self._send())

    async def _send(self) -> Record:
        request = next(self._requests)
        if self._alone:
            request = BenchRequest(prompt=request.prompt, max_tokens=min(request.max_tokens, ALONE_OUTPUT))
        extra = {"temperature": 0.0, "ignore_eos": True}
        ended = await self._target.stream(body_of(request, model=self._model, chat=self._target.is_chat, extra=extra), timeout=600.0)
        if ended.error is not None:
            raise StartError(f"A request of the measurement failed: {ended.error}")
        return ended


def steps_of(recording: Recording) -> list[dict[str, Any]]:
    """The runner's slices, by time."""
    events = recording["traceEvents"]
    found = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (ENGINE, RUNNER)]
    return sorted(found, key=lambda event: float(event["ts"]))


def rows_of(recording: Recording) -> dict[int, list[dict[str, Any]]]:
    """The slices of each request, by time: queued, then a slice for each of its rows."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in recording["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == REQUESTS:
            found[event["tid"]].append(event)
    for events in found.values():
        events.sort(key=lambda event: float(event["ts"]))
    return found


def samples_of(recording: Recording) -> list[Sample]:
    """One for each step. How long there was none before the first is not known; it is taken for one that follows another."""
    works: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])  # the fields of a `StepWork`
    for slices in rows_of(recording).values():
        rows = [event for event in slices if "args" in event]
        for event, later in itertools.zip_longest(rows, rows[1:]):
            place = event["args"]
            tokens, position, work = place["tokens"], place["position"], works[place["step"]]
            if event["name"] == "decode":
                work[0] += 1
                work[1] += position + 1
                work[4] += 1
            else:
                work[2] += tokens
                work[3] += tokens * (position + tokens)
                work[4] += later is None or later["name"] == "decode"
    samples, ended = [], math.inf
    for event in steps_of(recording):
        number = int(str(event["name"]).removeprefix("step ").split(":")[0])
        begin, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
        idle, ended = begin - ended, begin + seconds
        found = StepWork(*works[number])
        if found.tokens:
            samples.append(Sample(found, seconds, idle if idle >= LONGEST_HANDOFF_S else 0.0))
    return samples


def handoffs(recording: Recording) -> list[float]:
    """Seconds from the end of a step to the start of the next one, where that was planned already."""
    steps = steps_of(recording)
    gaps = ((float(b["ts"]) - float(a["ts"]) - float(a["dur"])) / 1e6 for a, b in itertools.pairwise(steps))
    return [gap for gap in gaps if 0.0 <= gap < LONGEST_HANDOFF_S]


def delays_of(recordings: Sequence[Recording], records: Sequence[Record]) -> tuple[float, float, float]:
    """Seconds before the engine, of them for each prompt token, and behind it: the medians over all requests, however busy the engine was.

    `records`: of a client on the server's machine, whose clock is the recordings'. Of requests whose prompts have as many tokens, the one belongs to
    a record that came after it was sent and whose prompt was done before its first token was seen.
    """
    waiting: dict[int, list[tuple[float, float]]] = defaultdict(list)  # prompt tokens -> when requests came and when their prompts were done
    for recording in recordings:
        for tokens, came, done in _prompts_of(recording):
            waiting[tokens].append((came, done))
    before: list[tuple[int, float]] = []
    after: list[float] = []
    for record in sorted(records, key=lambda record: record.sent):
        here = waiting[record.num_prompt_tokens]
        match = next((times for times in here if record.sent <= times[0] and record.first is not None and times[1] <= record.first), None)
        if match is not None and record.first is not None:
            here.remove(match)
            before.append((record.num_prompt_tokens, match[0] - record.sent))
            after.append(record.first - match[1])
    if not before:
        return 0.0, 0.0, 0.0
    slope = max(0.0, _slope(before[:: -(-len(before) // MOST_POINTS)]))
    return max(0.0, statistics.median(seconds - slope * tokens for tokens, seconds in before)), slope, statistics.median(after)


def _prompts_of(recording: Recording) -> Iterator[tuple[int, float, float]]:
    """Tokens, arrival and end of each prompt that came and was done while the recording lasted, in monotonic seconds."""
    begin = float(recording["otherData"]["begin"])
    for slices in rows_of(recording).values():
        rows = [event for event in slices if "args" in event]
        prompts = [event for event in rows if event["name"] != "decode"]
        queued = [event for event in slices if event["name"] == "queued"]
        if queued and prompts and len(prompts) < len(rows):
            last = prompts[-1]
            tokens = last["args"]["position"] + last["args"]["tokens"]
            yield tokens, begin + float(queued[0]["ts"]) / 1e6, begin + (float(last["ts"]) + float(last["dur"])) / 1e6


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Theil-Sen: the median of the slopes between all pairs, which single pauses do not move. 0 where all have one length."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if a[0] != b[0]]
    return statistics.median(slopes) if slopes else 0.0
