"""Has the runner record kernels between two messages, and sends what there was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from headrace.core.messages import Kernel
from headrace.engine.wire import FromEngine, Kernels, Record


class Profiled(Protocol):
    """See `runner.interface.Runner`."""

    def start_profile(self) -> None: ...
    def stop_profile(self) -> Callable[[], tuple[Kernel, ...]]: ...


class KernelRecorder:
    """`record` is called in the runner's thread, between steps. `emit` is called from any thread."""

    def __init__(self, runner: Profiled, emit: Callable[[FromEngine], None]) -> None:
        self._runner = runner
        self._emit = emit
        self._recording = False

    def record(self, message: Record) -> None:
        """Begins, or ends what was begun."""
        try:
            if self._recording:
                self._recording = False
                kernels = self._runner.stop_profile()
                threading.Thread(target=self._send, args=(kernels,), name="kernels", daemon=True).start()
            if message.kernels:
                self._runner.start_profile()
                self._recording = True
        except Exception as error:  # a profiler that fails must not end requests
            self._emit(Kernels((), f"{type(error).__name__}: {error}"))

    def _send(self, kernels: Callable[[], tuple[Kernel, ...]]) -> None:
        try:
            self._emit(Kernels(kernels()))
        except Exception as error:
            self._emit(Kernels((), f"{type(error).__name__}: {error}"))
