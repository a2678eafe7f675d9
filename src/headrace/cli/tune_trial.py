"""A trial of `headrace tune`: a server with some settings, the load over HTTP, and what came of it."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from headrace.bench.figures import figures
from headrace.bench.load import Run, run_load
from headrace.bench.sse_client import Record, Target
from headrace.bench.traces import Trace, bench_request
from headrace.cli.api_client import ApiClient
from headrace.cli.local_server import local_server
from headrace.cli.plan_engine import scheduler_config
from headrace.cli.settings import engine_options, read_config_file
from headrace.config import EngineConfig
from headrace.errors import ConfigError, StartError
from headrace.plan.costs import fit
from headrace.plan.fleet import Engine, replay
from headrace.plan.measure import Recording, samples_of
from headrace.plan.search import OutOfTime
from headrace.plan.simulator import Delays
from headrace.plan.slo import Limit
from headrace.plan.tuning import TrialBook, TrialResult, score_of, score_run, time_to_lose

RECORD_S, RECORDINGS = 4.0, 3  # of the first trial's steps, for the simulation: so many recordings at most, one after the other while there is load
WARM_UP = 2  # requests before the load
SLACK = 1.05  # times the time after which a trial can't win
KEPT = ("request_throughput", "output_throughput", "median_ttft_ms", "p95_ttft_ms", "median_itl_ms", "p95_itl_ms", "median_e2el_ms", "p95_e2el_ms")


class Trials:
    """`fixed`: settings of every trial. `end`: monotonic seconds; no trial begins that would probably end later. `record`: whether steps of the
    first trial are recorded, for `expectation`.
    """

    def __init__(
        self,
        model: str | None,
        trace: Trace,
        limits: Sequence[Limit],
        fixed: Mapping[str, Any],
        book: TrialBook,
        *,
        end: float,
        record: bool = True,
    ) -> None:
        from tqdm import tqdm

        from headrace.models.store import DEFAULT_MODEL, resolve_model

        # another runner gives the name its own meaning
        self._path = Path(model or DEFAULT_MODEL) if "runner-factory" in fixed else resolve_model(model)
        self._trace, self._limits, self._fixed, self._book, self._end = trace, limits, dict(fixed), book, end
        self._requests = [bench_request(request, number) for number, request in enumerate(trace.requests)]
        self._recordings: list[Recording] | None = None if record else []  # None: no trial was recorded yet
        self._room: tuple[int, int] | None = None  # KV tokens of the recorded server, and its longest request
        self.bar = tqdm(total=len(self._requests), unit="request", dynamic_ncols=True, file=sys.stderr, leave=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.bar.close()

    def is_valid(self, settings: Mapping[str, Any]) -> bool:
        """Whether a server takes these values together."""
        try:
            EngineConfig(model="", **engine_options(self._options(settings)))
        except ConfigError:
            return False
        return True

    def score(self, settings: Mapping[str, Any], best: float) -> float:
        """Of a trial that was made before, or of one that is made now. Raises `OutOfTime`, but never before a first trial."""
        known = self._book.find(settings)
        if known is not None:
            return known.score
        begin = time.monotonic()
        made = [trial.seconds for trial in self._book.trials]
        if made and begin + max(made[-3:]) > self._end:
            raise OutOfTime
        trial = self._trial(dict(settings), best, begin)
        self._book.add(trial)
        return trial.score

    def again(self, settings: Mapping[str, Any]) -> None:
        """One more run of a trial that was made before. Raises `OutOfTime`."""
        begin = time.monotonic()
        known = self._book.find(settings)
        if known is None or begin + known.seconds > self._end:
            raise OutOfTime
        self._book.add(self._trial(dict(settings), 0.0, begin))

    def _trial(self, settings: dict[str, Any], best: float, begin: float) -> TrialResult:
        self.bar.reset(total=len(self._requests))
        self.bar.set_description(f"trial {len(self._book.trials) + 1}, {max(0.0, self._end - begin):.0f} s left")
        key = secrets.token_hex(16)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(self._settings(settings), file)
            file.flush()
            try:
                with local_server(self._path, ["--config", file.name], key=key) as server:
                    target = Target(server.url, api_key=key)
                    api = ApiClient(server.url, api_key=key)
                    ended, run = asyncio.run(self._load(target, api, server.model(), best))
                    if self._room is None:
                        status = api.call("GET", "/v1/status")
                        block_size = int(self._settings(settings).get("block-size", 16))
                        self._room = (status["engine"]["kv_blocks"]["total"] * block_size, status["max_model_len"])
            except StartError as error:
                return TrialResult(settings=settings, score=0.0, seconds=time.monotonic() - begin, error=str(error))
        seconds = time.monotonic() - begin
        if run is None:
            return TrialResult(settings=settings, score=ended, seconds=seconds, cut_short=True)
        found = figures(run)
        return TrialResult(
            settings=settings, score=score_run(run, self._limits), seconds=seconds, figures={name: float(found[name]) for name in KEPT}
        )

    async def _load(self, target: Target, api: ApiClient, model: str, best: float) -> tuple[float, Run | None]:
        """The run; where it was ended early requests per second up to there, and None."""
        extra = {"temperature": 0.0, "ignore_eos": True}
        warm = [bench_request(request, number, seed=1) for number, request in enumerate(self._trace.requests[:WARM_UP])]
        failed = [record.error for record in (await run_load(target, warm, [0.0] * len(warm), model=model, extra=extra)).records if record.error]
        if failed:
            raise StartError(f"a request before the load failed: {failed[0]}")
        loaded = asyncio.Event()
        recorder = asyncio.create_task(self._record(api, loaded)) if self._recordings is None else None
        ended = 0

        def on_end(record: Record) -> None:
            nonlocal ended
            ended += 1
            self.bar.update()

        moments = [request.arrival for request in self._trace.requests]
        limit = time_to_lose(len(moments), best, self._limits)
        run: Run | None = None
        try:
            async with asyncio.timeout(None if limit is None else limit * SLACK):
                run = await run_load(target, self._requests, moments, model=model, extra=extra, on_end=on_end)
        except TimeoutError:
            pass
        loaded.set()
        if recorder is not None:
            self._recordings = await recorder
        return (0.0 if limit is None else ended / (limit * SLACK)), run

    @staticmethod
    async def _record(api: ApiClient, loaded: asyncio.Event) -> list[Recording]:
        found: list[Recording] = []
        while len(found) < RECORDINGS and not loaded.is_set():
            found.append(await asyncio.to_thread(api.call, "POST", f"/debug/trace?seconds={RECORD_S:g}"))
        return found

    def expectation(self) -> Callable[[Mapping[str, Any]], float] | None:
        """The score that the simulation expects, from the steps of a trial that was recorded; None where none was, or too little of it."""
        if self._recordings is None or self._room is None:
            return None
        try:
            known = [sample for recording in self._recordings for sample in samples_of(recording)]
            costs = fit(known, noise=None)
        except ConfigError:
            return None
        room, longest = self._room

        def expected(settings: Mapping[str, Any]) -> float:
            if not self.is_valid(settings):
                return 0.0
            options = self._options(settings)
            options.pop("speculative-config", None)
            config = scheduler_config(self._trace, options, max_model_len=longest, num_blocks=room // int(options.get("block-size", 16)))
            fleet = replay(self._trace, Engine(config=config, costs=lambda number: costs, delays=Delays(cold=costs.cold), known=known), 1)
            assert fleet is not None
            values = {limit.name: limit.value(fleet.latencies[limit.metric]) for limit in self._limits}
            return score_of(fleet.figures()["request_throughput"], self._limits, values)

        return expected

    def _settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All that the trial's config file holds."""
        return {name: value for name, value in (self._fixed | dict(settings)).items() if value is not None}

    def _options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The same as the flags are read."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(self._settings(settings), file)
            file.flush()
            return read_config_file(file.name)
