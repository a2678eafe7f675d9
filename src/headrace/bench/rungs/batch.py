"""Answers requests in batches that are formed once: whoever comes later waits for the next one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.bench.rungs.plain_model import Cache, Part, PlainModel
from headrace.bench.rungs.prefixes import KeptPrefixes
from headrace.observe.work import Work, WorkLedger

PREFILL_TOKENS = 4096  # prompts are computed together up to so many


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    prompt: Sequence[int]  # token ids, at least one
    max_tokens: int
    ignore_eos: bool
    on_token: Callable[[int], None]  # called in the worker's thread, as all of these
    on_end: Callable[[Exception | None], None]  # once; an exception: the batch failed
    answer: list[int] = field(default_factory=list)
    ended: bool = False


class Worker:
    """One thread that computes. `max_batch` 1 and `window_s` 0: one request at a time."""

    def __init__(self, model: PlainModel, *, max_batch: int, window_s: float, prefixes: KeptPrefixes | None) -> None:
        self._model, self._max_batch, self._window_s, self._prefixes = model, max_batch, window_s, prefixes
        self._inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._ledger = WorkLedger(time.monotonic())
        self.work = Work()  # where the time went; a new one after every step
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def submit(self, job: Job) -> None:
        self._inbox.put(job)

    def _run(self) -> None:
        while True:
            jobs = self._next_batch()
            try:
                self._answer(jobs)
            except Exception as error:
                for job in jobs:
                    if not job.ended:
                        job.on_end(error)

    def _next_batch(self) -> list[Job]:
        """The first request and those that come within the window behind it."""
        self._ledger.pass_between("host", time.monotonic())
        jobs = [self._inbox.get()]
        begin = time.monotonic()
        self._ledger.pass_between("idle", begin)
        while len(jobs) < self._max_batch:
            try:
                jobs.append(self._inbox.get(timeout=max(0.0, begin + self._window_s - time.monotonic())))
            except queue.Empty:
                break
        self._ledger.pass_between("waiting", time.monotonic())
        return jobs

    def _answer(self, jobs: list[Job]) -> None:
        cache = self._model.new_cache(len(jobs), max(len(job.prompt) + job.max_tokens for job in jobs))
        starts = [0 if self._prefixes is None else self._prefixes.fill(cache, row, job.prompt) for row, job in enumerate(jobs)]
        prompts = [Part(row=row, start=start, token_ids=job.prompt[start:]) for row, (job, start) in enumerate(zip(jobs, starts, strict=True))]
        for group in _groups(prompts):
            self._step(cache, group, jobs)
        if self._prefixes is not None:
            for row, job in enumerate(jobs):
                self._prefixes.keep(cache, row, job.prompt)
        while not all(job.ended for job in jobs):
            # the batch stays as it is until its longest answer is there: rows that have ended are computed with the others
            rows = [Part(row=row, start=len(job.prompt) + len(job.answer) - 1, token_ids=job.answer[-1:]) for row, job in enumerate(jobs)]
            self._step(cache, rows, jobs)

    def _step(self, cache: Cache, parts: list[Part], jobs: list[Job]) -> None:
        begin = time.monotonic()
        tokens = self._model.step(cache, parts)
        model_seconds = time.monotonic() - begin
        padding = 0
        for part, token in zip(parts, tokens, strict=True):
            job = jobs[part.row]
            if job.ended:
                padding += len(part.token_ids)
            else:
                self._take(job, token)
        useful = sum(len(part.token_ids) for part in parts) - padding
        seconds = self._ledger.lap(time.monotonic())
        self._ledger.add_step(seconds, path="ready", model_seconds=model_seconds, tokens={"useful": useful, "padding": padding})
        self.work = self._ledger.snapshot()

    def _take(self, job: Job, token: int) -> None:
        job.answer.append(token)
        job.on_token(token)
        if len(job.answer) == job.max_tokens or (token in self._model.eos_token_ids and not job.ignore_eos):
            job.ended = True
            job.on_end(None)


def _groups(parts: list[Part]) -> list[list[Part]]:
    """Prompts in turn, together as long as they are few tokens."""
    groups: list[list[Part]] = []
    for part in parts:
        if not groups or sum(len(other.token_ids) for other in groups[-1]) + len(part.token_ids) > PREFILL_TOKENS:
            groups.append([])
        groups[-1].append(part)
    return groups
