"""The engine as the HTTP process sees it: requests in, streams of tokens out, and a child process that is started again when it dies.

Everything here happens on one event loop. A request is a *sink*: the client calls it with each output as it arrives. `submit` wraps a sink
in an async iterator whose outputs, as long as nobody takes them, grow together: a slow consumer costs the memory of its own tokens and holds
up nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from dataclasses import replace
from typing import Literal, Protocol

from headrace.config import CompileStatus, EngineConfig, EngineInfo
from headrace.core.explain import Explanation, Query
from headrace.core.messages import AbortRequest, AddRequest, SchedulerStats, TokenOutput
from headrace.engine.engine_process import EngineProcess, LaunchedEngine
from headrace.engine.output_error import error_of
from headrace.engine.request_stream import RequestStream
from headrace.engine.timeline import Watcher
from headrace.engine.totals import add_totals
from headrace.engine.trace import Trace, TraceRecorder
from headrace.engine.wire import (
    Abort,
    Add,
    Explain,
    Explained,
    Failed,
    Heartbeat,
    Kernels,
    Outputs,
    Started,
    StepTrace,
    Timeline,
    Vocabulary,
    WireError,
)
from headrace.errors import ConfigError, EngineUnavailable, InvalidRequest, ModelLoadError, RequestError, StartError
from headrace.text.grammar_vocabulary import GrammarVocabulary

State = Literal["starting", "ready", "draining", "restarting", "dead"]

RESTART_WINDOW_S = 600.0
FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 30.0
CLOSE_GRACE_S = 3.0
SAVE_GRACE_S = 60.0  # where sessions are written at the end
_START_ERRORS: dict[str, type[StartError]] = {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}

logger = logging.getLogger("headrace.engine")


class Sink(Protocol):
    """Takes what becomes of one request. Called on the event loop; must not block and must not raise."""

    def push(self, output: TokenOutput) -> None:
        """The next tokens; the last output has a `finish_reason`, which is not "error"."""

    def fail(self, error: RequestError) -> None:
        """The request has failed; nothing follows."""


class EngineClient:
    """Owns the engine process of one `EngineConfig`.

    `max_restarts` within ten minutes bring a dead engine back; after that the state is "dead" for good. `launched`: the first engine, where
    it has been started already.
    """

    def __init__(self, config: EngineConfig, *, max_restarts: int = 5, launched: LaunchedEngine | None = None) -> None:
        self.config = config
        self._launched = launched
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        self.heartbeat: Heartbeat | None = None  # the latest; None until the engine has started
        self.restarts_total = 0
        self._stats: SchedulerStats | None = None
        self._earlier: SchedulerStats | None = None  # the last snapshot of the engines that have died
        self._compile: CompileStatus | None = None
        self._earlier_compile: CompileStatus | None = None
        self._max_restarts = max_restarts
        self._process: EngineProcess | None = None
        self._vocabulary: GrammarVocabulary | None = None  # every engine is taught
        self._open: dict[str, Sink | None] = {}  # every id that the engine knows; None: aborted, its last output is still to come
        self._watchers: dict[str, Watcher] = {}  # of open requests that are traced
        self._tasks: list[asyncio.Task[None]] = []
        self._queries: dict[int, asyncio.Future[Explanation]] = {}  # by their id
        self._query_ids = itertools.count()
        self._recorder = TraceRecorder()
        self._idle = asyncio.Event()  # no id is open
        self._idle.set()
        self._last_heard = 0.0  # monotonic seconds of the engine's latest sign of life
        self._deaths: deque[float] = deque()  # monotonic seconds

    @property
    def stats(self) -> SchedulerStats | None:
        """The scheduler's latest snapshot: a few times a second under load, and one at rest. Its totals go on over restarts."""
        return self._stats

    @property
    def compile(self) -> CompileStatus | None:
        """How far faster paths are prepared, and what they have served; None until the engine has told."""
        return self._compile

    @property
    def num_open(self) -> int:
        """Requests that the engine has accepted and not ended, aborted ones included until it confirms their end."""
        return len(self._open)

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineInfo:
        """Starts the engine and waits until it serves. Raises the engine's `StartError`; the state is "dead" then."""
        try:
            info = await self._launch()
        except BaseException:
            self.state = "dead"
            raise
        self.state = "ready"
        self._tasks = [asyncio.create_task(self._supervise(), name="engine supervisor"), asyncio.create_task(self._watch(), name="engine watchdog")]
        for task in self._tasks:
            task.add_done_callback(self._notice_fault)
        return info

    def submit(self, request: AddRequest, watcher: Watcher | None = None) -> RequestStream:
        """Hands the request to the engine and returns the iterator of its outputs, which must be closed or read to its end.

        Closing it early aborts the request. Raises `EngineUnavailable` at once if no engine takes requests now.
        """
        stream = RequestStream(lambda: self.abort(request.request_id))
        self.open(request, stream, watcher)
        return stream

    def open(self, request: AddRequest, sink: Sink, watcher: Watcher | None = None) -> None:
        """Hands the request to the engine; `sink` gets its outputs until the last one or a failure, `watcher` its timeline. Raises like `submit`."""
        if self.state != "ready" or self._process is None:
            raise self.unavailable()
        if request.request_id in self._open:
            raise InvalidRequest(f"A request with the id {request.request_id!r} runs already.", param="request_id")
        try:
            self._process.send(Add(request))
        except WireError as error:
            raise InvalidRequest(f"The request cannot be sent to the engine: {error}") from error
        if not self._open:
            self._last_heard = time.monotonic()
            self._idle.clear()
        self._open[request.request_id] = sink
        if watcher is not None:
            self._watchers[request.request_id] = watcher
        self._recorder.add_request(request)

    def teach(self, vocabulary: GrammarVocabulary) -> None:
        """What the engine must know before it is given a request with `params.structured`. Each engine is told once, later ones at their start."""
        if self._vocabulary is not None:
            return
        self._vocabulary = vocabulary
        if self.state == "ready" and self._process is not None:
            self._process.send(Vocabulary(vocabulary))

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> None:
        """Ends a request whose outputs nobody wants any more; its sink is not called again. Does nothing for one that has ended."""
        if self._open.get(request_id) is None:
            return
        self._open[request_id] = None
        if self._process is not None:
            self._process.send(Abort(AbortRequest(request_id=request_id, reason=reason)))

    async def explain(self, token_ids: tuple[int, ...], *, cache_salt: str | None = None, tenant: str = "") -> Explanation:
        """Why a prompt would be found in the prefix cache now, or would not. Raises `EngineUnavailable` and `InvalidRequest`."""
        if self.state != "ready" or self._process is None:
            raise self.unavailable()
        query = Query(query_id=next(self._query_ids), token_ids=token_ids, cache_salt=cache_salt, tenant=tenant)
        try:
            self._process.send(Explain(query))
        except WireError as error:
            raise InvalidRequest(f"The query cannot be sent to the engine: {error}") from error
        future: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._queries[query.query_id] = future
        try:
            return await future
        finally:
            self._queries.pop(query.query_id, None)

    async def trace(self, seconds: float, *, kernels: bool = False) -> Trace:
        """Records what happens from now on for so long. Raises `EngineUnavailable`, and `QueueFull` while another trace is recorded."""
        if self.state != "ready" or self._process is None:
            raise self.unavailable()
        return await self._recorder.record(seconds, self._process.send, kernels=kernels)

    async def drain(self, timeout: float) -> bool:
        """Takes no more requests and waits for the open ones. False if some are still open after `timeout` seconds."""
        if self.state != "dead":
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends the engine process, by force after a few seconds. Open requests fail with `EngineUnavailable`."""
        serving = self.state in ("ready", "draining")
        self.state = "dead"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        process, self._process = self._process, None
        self._fail_open("The engine has been shut down.")
        if process is not None:
            await process.close(self._close_grace() if serving else 0.0)  # one that loads its model would not listen

    def _close_grace(self) -> float:
        return CLOSE_GRACE_S if self.config.session_dir is None else SAVE_GRACE_S

    async def _launch(self) -> EngineInfo:
        """Spawns a child and waits for `Started`. Kills it on any failure."""
        launched, self._launched = self._launched, None
        process = self._process = await (EngineProcess.spawn(self.config) if launched is None else EngineProcess.adopt(launched))
        try:
            try:
                message = await process.receive()
            except WireError as error:
                raise StartError(str(error)) from error
            if isinstance(message, Started):
                self.info = message.info
                self._stats = add_totals(message.stats, self._earlier)
                self._last_heard = time.monotonic()
                if self._vocabulary is not None:
                    process.send(Vocabulary(self._vocabulary))
                return message.info
            if isinstance(message, Failed):
                raise _START_ERRORS.get(message.kind, StartError)(message.message)
            code = await process.kill()
            raise StartError(f"The engine process ended with exit code {code} before it was ready.")
        except BaseException:
            self._process = None
            await process.kill()
            raise

    async def _supervise(self) -> None:
        """Reads from the engine; when it dies, fails what is open and starts another one."""
        while True:
            reason = await self._read()
            process, self._process = self._process, None
            code = None if process is None else await process.kill()
            draining = self.state == "draining"
            if not draining:
                self.state = "restarting"
            logger.error("the engine process ended (%s, exit code %s)%s", reason, code, "" if draining else "; starting it again")
            self._fail_open(f"The engine died while it served this request ({reason}).")
            if draining:
                return
            if not await self._restart():
                self.state = "dead"
                logger.critical("the engine died %d times within %.0f minutes and is not started again", len(self._deaths), RESTART_WINDOW_S / 60)
                return
            if self.state == "restarting":
                self.state = "ready"

    def _notice_fault(self, task: asyncio.Task[None]) -> None:
        """A fault of this class must not leave requests waiting for ever."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("the %s failed: %s: %s", task.get_name(), type(error).__name__, error, exc_info=error)
            self.state = "dead"
            self._fail_open("The connection to the engine has failed.")

    async def _restart(self) -> bool:
        """Starts another child, with growing pauses; False when `max_restarts` are used up."""
        while True:
            now = time.monotonic()
            while self._deaths and self._deaths[0] < now - RESTART_WINDOW_S:
                self._deaths.popleft()
            self._deaths.append(now)
            if len(self._deaths) > self._max_restarts:
                return False
            self.restarts_total += 1
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (len(self._deaths) - 1), LONGEST_BACKOFF_S))
            try:
                await self._launch()
            except (StartError, OSError) as error:
                logger.error("the engine could not be started again: %s", error)
            else:
                return True

    async def _read(self) -> str:
        """Delivers the engine's messages until it ends; returns why it did."""
        process = self._process
        assert process is not None
        reason = "it was killed or crashed"
        while True:
            try:
                message = await process.receive()
            except WireError as error:
                return str(error)
            self._last_heard = time.monotonic()
            match message:
                case None:
                    return reason
                case Outputs(outputs, retry_after):
                    for output in outputs:
                        self._deliver(output, retry_after)
                case Heartbeat():
                    self.heartbeat = message
                    self._stats = add_totals(message.stats, self._earlier)
                    if message.compile is not None:
                        self._compile = add_totals(message.compile, self._earlier_compile)
                case StepTrace():
                    self._recorder.add_step(message)
                case Kernels():
                    self._recorder.add_kernels(message)
                case Timeline():
                    if (watcher := self._watchers.pop(message.request_id, None)) is not None:
                        watcher.computed(message)
                case Explained(explanation):
                    query = self._queries.get(explanation.query_id)
                    if query is not None and not query.done():  # else nobody waits for it any more
                        query.set_result(explanation)
                case Failed():
                    reason = message.message
                case Started():
                    return "it started twice"

    def _deliver(self, output: TokenOutput, retry_after: int | None) -> None:
        sink = self._open.get(output.request_id)
        self._recorder.add_output(output, self._last_heard)
        if output.finish_reason is not None:
            self._open.pop(output.request_id, None)
            self._watchers.pop(output.request_id, None)  # one that the engine refused before it took it in
            if not self._open:
                self._idle.set()
        if sink is None:
            return
        if output.finish_reason == "error":
            sink.fail(error_of(output, retry_after))
        else:
            sink.push(output)

    def _fail_open(self, message: str) -> None:
        sinks = list(self._open.values())
        self._open.clear()
        self._watchers.clear()
        self._recorder.add_kernels(Kernels((), message))
        self._idle.set()
        self.heartbeat = None
        if self._stats is not None:  # a dead engine runs nothing
            free = self._stats.num_blocks
            self._stats = replace(
                self._stats, num_running=0, num_waiting=0, num_swapped=0, num_free_blocks=free, num_cached_blocks=0, num_evictable_blocks=0
            )
            self._earlier = self._stats
            self._earlier_compile = self._compile
        for sink in sinks:
            if sink is not None:
                sink.fail(EngineUnavailable(message))
        for query in self._queries.values():
            if not query.done():
                query.set_exception(EngineUnavailable(message))

    async def _watch(self) -> None:
        """Kills an engine whose step, or whose loop, is stuck; `_supervise` sees the end of the stream and does the rest."""
        while True:
            limit = self.config.step_timeout_s
            await asyncio.sleep(min(1.0, limit / 4))
            if self._process is None or not self._open:
                continue
            seconds = self._stuck_seconds(time.monotonic())
            if seconds > limit:
                logger.error("a step has been running for %.1f s, more than --step-timeout %g: the engine is killed", seconds, limit)
                await self._process.kill()

    def _stuck_seconds(self, now: float) -> float:
        """The age of the running step, or of the latest sign of life where that is older."""
        started = self.heartbeat.step_started if self.heartbeat is not None else None
        return now - min(self._last_heard, now if started is None else started)

    def unavailable(self) -> EngineUnavailable:
        """The error of a request that comes now."""
        message = {
            "starting": "The engine is starting.",
            "ready": "The engine is restarting.",
            "draining": "The server is shutting down and takes no new requests.",
            "restarting": "The engine has died and is being restarted.",
            "dead": "The engine is not running.",
        }[self.state]
        return EngineUnavailable(message)
