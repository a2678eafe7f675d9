"""The engine's process: `python -m headrace.engine.engine_host FD`, where FD is one end of a socket pair.

The first frame in is the `EngineConfig`, the first frame out is `Started` or `Failed`. Three threads besides the runner's: the main thread
turns the wheel, a reader feeds its inbox, a writer encodes and sends, so the wheel never waits for the HTTP process. The process ends when
it is told to, when the engine is broken, and at once when the other end of the socket is gone. Signals for a graceful end (SIGINT, SIGTERM)
are the parent's to act on: a terminal or an init system sends them to both processes, and running requests must still be drained.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

from headrace.config import EngineConfig, EngineInfo, SchedulerConfig
from headrace.core.scheduler import Scheduler
from headrace.engine.engine_core import EngineCore, Inbound, News, debugging
from headrace.engine.grammar_gate import GrammarGate
from headrace.engine.heap import release_code_of_the_start, release_freed_memory, return_large_blocks_at_once
from headrace.engine.session_store import SessionStore
from headrace.engine.wire import Configure, Failed, FromEngine, Started, WireError, decode_to_engine, encode_frame, read_body
from headrace.errors import ConfigError, StartError
from headrace.runner.factory import make_runner
from headrace.runner.interface import Runner
from headrace.runner.torch_import import defer_unused_parts

EXIT_BROKEN = 70  # the engine ran and cannot go on (EX_SOFTWARE)
PR_SET_PDEATHSIG = 1


class Writer:
    """Sends frames from a thread of its own. `send` never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def send(self, message: FromEngine) -> None:
        self._queue.put(message)

    def close(self) -> None:
        """Returns when all that was sent has left."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._connection.sendall(encode_frame(message))
            except OSError:
                os._exit(0)  # the parent is gone
            except WireError as error:
                _break(error)


def main(fd: int) -> int:
    """Serves one client until the end; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    os.set_inheritable(fd, False)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    for name in ("headrace.compile", "headrace.kernels", "headrace.sessions"):  # what takes long, or changes how it is served
        logging.getLogger(name).setLevel(logging.INFO)
    return_large_blocks_at_once()
    defer_unused_parts()
    connection = socket.socket(fileno=fd)
    writer = Writer(connection)
    try:
        code = _serve(connection, writer)
    except StartError as error:
        code = _report(writer, error, error.exit_code)
    except Exception as error:
        code = _report(writer, error, EXIT_BROKEN)
    writer.close()
    return code


def _serve(connection: socket.socket, writer: Writer) -> int:
    body = read_body(connection)
    if body is None:
        return 0
    first = decode_to_engine(body)
    if not isinstance(first, Configure):
        raise WireError(f"The first frame must be Configure, not {type(first).__name__}.")
    config = first.config
    inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
    gate = GrammarGate(inbox.put, writer.send)
    # From before the model is loaded, so that the parent's death ends that too.
    threading.Thread(target=_read, args=(connection, gate), name="reader", daemon=True).start()
    begin = time.monotonic()
    runner = make_runner(config, gate)
    try:
        info = runner.info(load_seconds=time.monotonic() - begin)
        scheduler = Scheduler(scheduler_config(config, info, num_host_blocks=runner.num_host_blocks))
        core = EngineCore(
            runner,
            scheduler,
            gate.emit,
            inbox=inbox,
            async_scheduling=config.async_scheduling,
            compile_status=runner.compile_status,
            at_rest=release_freed_memory,
        )
        sessions = open_sessions(config, scheduler, runner)
        release_freed_memory()
        release_code_of_the_start()
        writer.send(Started(info, scheduler.stats()))
        runner.start_preparation(lambda: core.post(News()))
        core.run()
        if sessions is not None:
            core.abandon_plan()
            sessions.save()
    finally:
        runner.close()
    return 0


def open_sessions(config: EngineConfig, scheduler: Scheduler, runner: Runner) -> SessionStore | None:
    """Brings back the sessions that an earlier engine has left; None where none are kept."""
    if config.session_dir is None:
        return None
    store = SessionStore(config.session_dir, quota=config.session_quota, kv=scheduler.kv, runner=runner)
    store.load()
    return store


def _read(connection: socket.socket, gate: GrammarGate) -> None:
    """Body of the reader's thread."""
    try:
        while (body := read_body(connection)) is not None:
            message = decode_to_engine(body)
            if isinstance(message, Configure):
                raise WireError("Configure came twice.")
            gate.put(message)
    except OSError:
        pass  # a reset is an end like any other
    except WireError as error:
        _break(error)
    os._exit(0)  # the parent is gone: nobody wants what is still computed


def _break(error: WireError) -> NoReturn:
    """Ends the process where the socket cannot tell why any more."""
    print(f"headrace engine: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_BROKEN)


def scheduler_config(config: EngineConfig, info: EngineInfo, *, num_host_blocks: int) -> SchedulerConfig:
    """What the scheduler decides with. Raises `ConfigError` if the KV storage cannot hold one request of the full length."""
    room = info.num_blocks * info.block_size
    if room < info.max_model_len:
        raise ConfigError(
            f"The KV storage of {info.num_blocks} blocks holds {room} tokens, but --max-model-len is {info.max_model_len}: "
            f"lower --max-model-len to {room} or less, or give more with --kv-memory."
        )
    return SchedulerConfig(
        max_model_len=info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        speculative_config=config.speculative_config,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_host_blocks=num_host_blocks,
        preemption_mode=config.preemption_mode,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        scheduling_policy=config.scheduling_policy,
        max_num_queued_reqs=config.max_num_queued_reqs,
        target_itl_ms=config.target_itl_ms,
        session_lease_s=config.session_lease_s,
        tenant_weights=config.tenant_weights,
    )


def _report(writer: Writer, error: Exception, exit_code: int) -> int:
    """Tells the parent in one line why the process ends."""
    if debugging():
        traceback.print_exception(error)
    message = str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"
    writer.send(Failed(type(error).__name__, message, exit_code))
    return exit_code


def _die_with_parent() -> None:
    """Linux: the kernel kills this process when the thread that started it ends, even if the socket is held open by somebody else."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # threads and gigabytes need no tidy end
