"""The compiling process seen from its parent: started when the first package is wanted, ended with its parent.

See `compile_worker.py` for the other end.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headrace.kernels import cpu
from headrace.runner.buckets import Bucket
from headrace.runner.compile_worker import Job, send_job
from headrace.runner.step_module import StepModule, StepShape, skeleton

LOW_PRIORITY = 19
_TICK_S = 1.0
_REMOVE_TRIES, _REMOVE_PAUSE_S = 20, 0.05


class CompileFailed(Exception):
    """There is no package, and the message says why."""


class Stopped(Exception):
    """Nobody wants the package any more."""


def remove(folder: Path) -> None:
    """Removes a folder into which processes may still write that have been killed already."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_REMOVE_PAUSE_S)


class BackgroundCompiler:
    """One process for all buckets of a service. Whoever made it must call `close()`."""

    def __init__(self, module: StepModule, shape: StepShape, buckets: tuple[Bucket, ...], kernels: cpu.CpuKernels, *, nice: int) -> None:
        self._job_parts = (module, shape, buckets, kernels, nice)
        self._buckets = buckets
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def compile(self, bucket: Bucket, tick: Callable[[], None]) -> bytes:
        """The package of one bucket. Blocks for as long as compilers take and calls `tick` about once a second, which may raise to give up.

        Raises `CompileFailed`.
        """
        try:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{self._buckets.index(bucket)}\n".encode())
            process.stdin.flush()
            while not select.select([process.stdout], [], [], _TICK_S)[0]:
                tick()
            line = process.stdout.readline()
        except OSError as error:
            tick()  # it may have been ended on purpose
            raise CompileFailed(f"the compiling process can't be run: {error}") from error
        if not line:
            tick()
            raise CompileFailed(f"the compiling process ended with exit code {process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise CompileFailed(answer["error"])
        return Path(answer["file"]).read_bytes()

    def kill(self) -> None:
        """Ends the process and its compilers; from any thread. A `compile` that waits for them gives up at once."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """The same, and removes their files; from the thread that compiles."""
        self.kill()
        if self._process is not None:
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            self._process = None
        if self._folder is not None:
            remove(self._folder)
            self._folder = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            module, shape, buckets, kernels, nice = self._job_parts
            self._folder = Path(tempfile.mkdtemp(prefix="headrace-compile-"))
            environment = dict(os.environ)
            environment |= {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
            environment["TMPDIR"] = str(self._folder)  # what compilers leave when they are killed goes with the folder
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "headrace.runner.compile_worker", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("HEADRACE_DEBUG") == "1" else subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
            job = Job(module=skeleton(module), shape=shape, buckets=buckets, kernels=kernels, nice=nice)
            assert self._process.stdin is not None
            send_job(self._process.stdin, job)
        return self._process
