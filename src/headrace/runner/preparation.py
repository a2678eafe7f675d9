"""Brings a service its faster paths while it already serves: from artifacts, from the compile cache, or by compiling in the background.

A thread of the engine process waits and loads; compiling itself is another process, at the lowest priority.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.kernels import cpu
from headrace.models.decoder import Decoder
from headrace.models.packed import PackedDecoder
from headrace.runner.artifacts import Artifacts
from headrace.runner.background import LOW_PRIORITY, BackgroundCompiler, Stopped
from headrace.runner.batch_inputs import Batch
from headrace.runner.buckets import Bucket, decode_buckets, mixed_buckets
from headrace.runner.compile_cache import open_store
from headrace.runner.compile_worker import FLAGS
from headrace.runner.compiled import CompiledSteps, LoadedStep
from headrace.runner.kv_storage import KVCaches
from headrace.runner.package_source import PackageSource
from headrace.runner.packages import PackageRefused, service_facts
from headrace.runner.step_module import StepModule, StepShape

logger = logging.getLogger("headrace.compile")

AUTO_MOST_TOKENS = 256  # steps of more tokens are arithmetic: there is little between the kernels to save
AUTO_DELAY_S = 10.0  # a service that ends before this never compiles, and the first requests have the machine for themselves


def why_not(config: EngineConfig, model: Decoder) -> str | None:
    """Why no step of this model can be compiled here; None where it can."""
    if model.device.type != "cpu":
        return f"steps are compiled for CPU, and this model computes on {model.device}"
    if not isinstance(model, PackedDecoder):
        return f"there are no CPU kernels: {cpu.reason()}" if cpu.reason() else "the weights are not packed for the CPU kernels"
    if config.deterministic:
        return "--deterministic computes in tiles of its own"
    if any(rope.length_dependent for rope in model.ropes):
        return "its rotation depends on the length of the whole request"
    return None


def step_shape(config: EngineConfig, max_model_len: int, caches: KVCaches) -> StepShape:
    """Of a service with these caches."""
    return StepShape(
        static_length=min(max_model_len, config.max_seq_len_to_capture),
        block_size=config.block_size,
        kv_dtype=str(caches[0][0].dtype).removeprefix("torch."),
    )


def planned_buckets(config: EngineConfig, *, all_steps: bool) -> tuple[Bucket, ...]:
    """Decode steps, the small ones first, then chunks of prompts: short ones, or with `all_steps` all."""
    mixed = mixed_buckets(config.max_num_seqs, config.max_num_batched_tokens)
    return (*decode_buckets(config.max_num_seqs), *(bucket for bucket in mixed if all_steps or bucket.num_tokens <= AUTO_MOST_TOKENS))


class Preparation:
    """`steps` serves; `start` begins to bring packages to it. `close` ends the bringing."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        *,
        max_model_len: int,
        caches: KVCaches,
        artifacts: Artifacts | None,
        general: Callable[[Batch], Tensor],
    ) -> None:
        reason = why_not(config, model)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        if reason is not None or (config.compile == "off" and artifacts is None):
            self.steps = CompiledSteps(config.compile, general, reason=None if config.compile == "off" else reason)
            return
        kernels = cpu.load()
        assert kernels is not None, "a packed model computes with kernels"
        self._mode = config.compile
        self._shape = step_shape(config, max_model_len, caches)
        if artifacts is not None:  # longer contexts take the ready path; what else differs is refused
            self._shape = replace(self._shape, static_length=artifacts.shape.static_length)
        self._artifacts = artifacts
        prepared = () if artifacts is None else tuple(artifacts.files)
        names = {bucket.name for bucket in prepared}
        planned = () if config.compile == "off" else planned_buckets(config, all_steps=config.compile == "full")
        self._buckets = (*prepared, *(bucket for bucket in planned if bucket.name not in names))
        self.steps = CompiledSteps(config.compile, general, shape=self._shape)
        self.steps.expect(self._buckets)
        module = StepModule(model, self._shape)
        self._caches = caches
        self._constants = module.constants()
        self._facts = service_facts(module, self._shape, kernels, FLAGS)
        self._compiler = BackgroundCompiler(module, self._shape, self._buckets, kernels, nice=LOW_PRIORITY)
        self._store = None if config.compile == "off" else open_store(config.compile_cache)
        self._thread = threading.Thread(target=self._run, name="compile", daemon=True)

    def start(self, on_change: Callable[[], None]) -> None:
        """`on_change` is told, from any thread, when `steps.status()` has moved. Returns at once."""
        self.steps.on_change = on_change
        if self._thread is not None:
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None and self._thread.ident is not None:
            self._compiler.kill()
            self._thread.join()
        self.steps.close()

    def _run(self) -> None:
        """Body of the thread."""
        begin = time.monotonic()
        try:
            missing = [bucket for bucket in self._buckets if not self._from_artifacts(bucket)]
            if self._mode == "off":
                return
            source = PackageSource(self._facts, self._store, self._compiler, self._wait, self.steps.count_compilation)
            missing = [bucket for bucket in missing if not self._from_cache(source, bucket)]
            if missing and self._mode == "auto":
                self._wait(AUTO_DELAY_S)
            if missing:
                logger.info("compiling %d kinds of steps in the background: %s", len(missing), ", ".join(bucket.name for bucket in missing))
                source.obtain(missing, begin=self.steps.begin, found=self._compiled, failed=self.steps.fail)
            logger.info("preparation ended after %.0f s", time.monotonic() - begin)
        except Stopped:
            return
        except Exception as error:
            logger.exception("compiling in the background ended by a fault; the ready path goes on")
            for bucket in self._buckets:
                if self.steps.is_open(bucket):
                    self.steps.fail(bucket, f"{type(error).__name__}: {error}")
        finally:
            self._compiler.close()

    def _from_artifacts(self, bucket: Bucket) -> bool:
        if self._artifacts is None or bucket not in self._artifacts.files:
            return False
        try:
            body = self._artifacts.package(bucket, self._facts)
        except PackageRefused as refused:
            logger.warning("--artifacts %s: %s is refused: %s", self._artifacts.folder, bucket.name, refused)
            if self._mode == "off":
                self.steps.fail(bucket, f"its artifact is refused: {refused}")
            return self._mode == "off"
        self._load(bucket, body, "artifact")
        return True

    def _from_cache(self, source: PackageSource, bucket: Bucket) -> bool:
        body = source.cached(bucket)
        if body is not None:
            self._load(bucket, body, "compile cache")
        return body is not None

    def _compiled(self, bucket: Bucket, body: bytes) -> None:
        self._load(bucket, body, "compiled")

    def _load(self, bucket: Bucket, body: bytes, source: str) -> None:
        self._wait(0.0)
        try:
            with tempfile.NamedTemporaryFile(prefix="headrace-", suffix=".pt2") as file:
                file.write(body)
                file.flush()
                with torch.inference_mode():
                    step = LoadedStep(Path(file.name), bucket, self._shape, constants=self._constants, caches=self._caches)
        except (RuntimeError, KeyError, OSError) as error:
            self.steps.fail(bucket, f"its package ({source}) can't be loaded: {type(error).__name__}: {error}")
        else:
            self.steps.bring(step, source=source)

    def _wait(self, seconds: float) -> None:
        """Sleeps; raises `Stopped` when the service ends."""
        if self._ended.wait(seconds):
            raise Stopped
