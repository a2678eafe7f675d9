"""`headrace compile`: every package of a service, beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config import EngineConfig
from headrace.errors import StartError
from headrace.kernels import cpu
from headrace.runner.artifacts import write_artifacts
from headrace.runner.background import BackgroundCompiler
from headrace.runner.buckets import Bucket
from headrace.runner.compile_cache import open_store
from headrace.runner.compile_worker import FLAGS
from headrace.runner.model_runner import ModelRunner
from headrace.runner.package_source import PackageSource
from headrace.runner.packages import service_facts
from headrace.runner.preparation import planned_buckets, step_shape, why_not
from headrace.runner.step_module import StepModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    packages: tuple[str, ...]
    compilations: int  # the others came from the compile cache
    num_bytes: int


def build_artifacts(config: EngineConfig, folder: Path, progress: Callable[[str, int, int], None]) -> Built:
    """Writes the packages of a service with this config, and the kernels, to `folder`.

    `progress(name, done, total)` is told before each package. Raises `StartError` where the model can't be compiled, or a package can't.
    """
    runner = ModelRunner(replace(config, compile="off", artifacts=None))
    reason = why_not(config, runner.model)
    if reason is not None:
        raise StartError(f"{config.model} can't be compiled: {reason}.")
    kernels = cpu.load()
    assert kernels is not None, "a packed model computes with kernels"
    shape = step_shape(config, runner.max_model_len, runner.caches)
    module = StepModule(runner.model, shape)
    buckets = planned_buckets(config, all_steps=config.compile == "full")
    facts = service_facts(module, shape, kernels, FLAGS)
    bodies: dict[Bucket, bytes] = {}
    compiled: list[Bucket] = []

    def fail(bucket: Bucket, why: str) -> None:
        raise StartError(f"{bucket.name} can't be compiled: {why}.")

    compiler = BackgroundCompiler(module, shape, buckets, kernels, nice=0)
    try:
        source = PackageSource(facts, open_store(config.compile_cache), compiler, time.sleep, compiled.append)
        source.obtain(
            buckets,
            begin=lambda bucket: progress(bucket.name, len(bodies), len(buckets)),
            found=bodies.__setitem__,
            failed=fail,
        )
    finally:
        compiler.close()
        runner.close()
    write_artifacts(folder, facts, shape, {bucket: bodies[bucket] for bucket in buckets}, kernels)
    return Built(packages=tuple(bucket.name for bucket in buckets), compilations=len(compiled), num_bytes=sum(map(len, bodies.values())))
