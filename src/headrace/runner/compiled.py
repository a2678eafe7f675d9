"""The compiled way of a step: loaded packages, which of them takes a step, and what they have served.

The runner's thread calls `forward`; any other may bring packages and news. A package comes in between two steps: `forward` looks once, at
its beginning, at what there is.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from headrace.config import CompileStatus
from headrace.runner.batch_inputs import Batch
from headrace.runner.buckets import Bucket, fitting
from headrace.runner.kv_storage import KVCaches
from headrace.runner.paths import Paths
from headrace.runner.static_inputs import StaticInputs
from headrace.runner.step_module import StepShape
from headrace.runner.trial import Trials

logger = logging.getLogger("headrace.compile")

Mode = Literal["off", "auto", "full"]
READY = "ready"  # the name of the path that takes any step


class PreparedStep(Protocol):
    """Computes steps of one bucket."""

    bucket: Bucket

    def run(self, batch: Batch) -> Tensor:
        """Hidden states of the batch's own tokens, [T, E]. Raises RuntimeError where the prepared form is at fault."""
        ...


class LoadedStep:
    """A package in this process. It reads the weights where they lie; `constants` must live as long as it does."""

    def __init__(self, package: Path, bucket: Bucket, shape: StepShape, *, constants: dict[str, Tensor], caches: KVCaches) -> None:
        """Raises RuntimeError where torch can't load the package, KeyError where it asks for a weight that isn't there."""
        self.bucket = bucket
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, -1)
        self._constants = {name: constants[name] for name in self._loader.get_constant_fqns()}
        self._loader.load_constants(self._constants, False, True, True)  # not the spare set, all of them, and no copy
        self._inputs = StaticInputs.empty(bucket, shape.table_width)
        self._caches = [tensor for pair in caches for tensor in pair]

    def run(self, batch: Batch) -> Tensor:
        (hidden,) = self._loader.boxed_run([*self._inputs.fill(batch), *self._caches])
        return hidden[: len(batch.input_ids_T)]


class CompiledSteps:
    """`general`: the ready path, which takes any step. `on_change` is told, from whatever thread, when a path's state has moved."""

    def __init__(self, mode: Mode, general: Callable[[Batch], Tensor], *, shape: StepShape | None = None, reason: str | None = None) -> None:
        self.mode = mode
        self.on_change: Callable[[], None] = lambda: None
        self._general = general
        self._static_length = 0 if shape is None else shape.static_length
        self._reason = reason  # why there is nothing to prepare
        self._paths = Paths([])
        self._lock = threading.Lock()
        self._loaded: dict[Bucket, PreparedStep] = {}  # replaced as a whole
        self._retired: frozenset[Bucket] = frozenset()  # a larger bucket does not pay for their steps either
        self._trials = Trials()
        self._by_torch_before = compiled_by_torch()
        self.last_path, self.last_padding = READY, 0  # what computed the last step, and how many tokens only filled its shape
        self._compiled_steps = self._general_steps = self._padded_tokens = self._compiled_tokens = self._compilations = self._recompiles = 0

    def expect(self, buckets: tuple[Bucket, ...]) -> None:
        """These will be prepared. Once."""
        self._paths = Paths(bucket.name for bucket in buckets)

    def begin(self, bucket: Bucket) -> None:
        """A compilation of the bucket begins, here or at a worker that shares its result. Again for one that has begun: nothing."""
        with self._lock:
            path = self._paths[bucket.name]
            if path.state == "ready":
                path.move("compile")
        self.on_change()

    def is_open(self, bucket: Bucket) -> bool:
        """Whether the bucket still waits for its package."""
        with self._lock:
            return self._paths[bucket.name].state in ("ready", "compiling")

    def count_compilation(self, bucket: Bucket) -> None:
        """A package was compiled for this service, as one is once for each path."""
        with self._lock:
            self._compilations += 1
            self._recompiles += self._paths[bucket.name].state in ("compiled", "failed", "retired")

    def bring(self, step: PreparedStep, *, source: str) -> None:
        """Serves from the next step on."""
        with self._lock:
            self._paths[step.bucket.name].move("load")
            self._loaded = self._loaded | {step.bucket: step}
        logger.info("%s is served compiled from now on (%s)", step.bucket.name, source)
        self.on_change()

    def fail(self, bucket: Bucket, reason: str) -> None:
        self._leave(bucket, "fail", reason)
        logger.warning("%s stays on the ready path: %s", bucket.name, reason)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, E] of a step, on the way that its shape and what was measured say."""
        self.last_path, self.last_padding = READY, 0
        num_tokens, num_rows = len(batch.input_ids_T), len(batch.order)
        loaded = self._loaded
        bucket = fitting((*loaded, *self._retired), num_tokens=num_tokens, num_rows=num_rows) if loaded else None
        if bucket not in loaded or max(batch.meta.context_lens) > self._static_length:
            self._general_steps += 1
            return self._general(batch)
        if self.mode != "auto":
            return self._run(loaded[bucket], batch)
        kind = (bucket, num_tokens if bucket.kind == "decode" else num_tokens.bit_length())  # steps that may be compared
        takes_compiled = self._trials.takes_compiled(kind)
        begin = time.perf_counter()
        hidden = self._run(loaded[bucket], batch) if takes_compiled else self._run_general(batch)
        verdict = self._trials.record(kind, compiled=takes_compiled, seconds=time.perf_counter() - begin, num_tokens=num_tokens)
        if verdict is not None:
            tokens = num_tokens if bucket.kind == "decode" else 1
            words = f"{verdict.compiled * tokens * 1e3:.2f} ms compiled, {verdict.general * tokens * 1e3:.2f} ms on the ready path"
            unit = f"of {num_tokens} rows" if bucket.kind == "decode" else "a token"
            logger.info("%s, steps %s: %s; the %s path serves them", bucket.name, unit, words, "compiled" if verdict.pays else "ready")
            if not verdict.pays and num_tokens == bucket.num_tokens:  # without padding it does not pay, so with it neither
                self._leave(bucket, "retire", f"measured on steps {unit}: {words}")
        return hidden

    def status(self) -> CompileStatus:
        """A snapshot, from any thread."""
        with self._lock:
            return CompileStatus(
                mode=self.mode,
                state=self._paths.state,
                reason=self._reason or self._paths.reason,
                paths=self._paths.statuses(),
                compiled_steps_total=self._compiled_steps,
                general_steps_total=self._general_steps,
                padded_tokens_total=self._padded_tokens,
                compiled_tokens_total=self._compiled_tokens,
                compilations_total=self._compilations,
                recompiles_total=self._recompiles + compiled_by_torch() - self._by_torch_before,
            )

    def close(self) -> None:
        """Lets go of the packages. Nothing may run afterwards."""
        self._loaded = {}

    def _run(self, step: PreparedStep, batch: Batch) -> Tensor:
        try:
            hidden = step.run(batch)
        except RuntimeError as error:
            self.fail(step.bucket, f"it raised while it ran: {str(error).strip().splitlines()[0]}")
            return self._run_general(batch)  # writes every key and value of the step again
        self.last_path, self.last_padding = step.bucket.name, step.bucket.num_tokens - len(hidden)
        self._compiled_steps += 1
        self._compiled_tokens += len(hidden)
        self._padded_tokens += self.last_padding
        return hidden

    def _run_general(self, batch: Batch) -> Tensor:
        self._general_steps += 1
        return self._general(batch)

    def _leave(self, bucket: Bucket, event: Literal["fail", "retire"], reason: str) -> None:
        with self._lock:
            self._paths[bucket.name].move(event, reason)
            self._loaded = {other: step for other, step in self._loaded.items() if other != bucket}
            if event == "retire":
                self._retired |= {bucket}
        self.on_change()


def compiled_by_torch() -> int:
    """Frames that torch.compile has compiled in this process; a service asks for none."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])
