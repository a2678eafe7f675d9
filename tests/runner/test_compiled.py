"""The compiled way inside a runner: the same ids as the ready path, whatever arrives, and counters that tell what was done.

Packages are stood in for by the step module itself on the same static inputs; `test_preparation.py` has real ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.runner.batch_inputs import Batch
from headrace.runner.buckets import Bucket, decode_buckets, mixed_buckets
from headrace.runner.compiled import CompiledSteps, Mode
from headrace.runner.model_runner import ModelRunner
from headrace.runner.static_inputs import StaticInputs
from headrace.runner.step_module import StepModule, StepShape
from headrace.runner.trial import Trials
from tests.models.tiny_models import prompt
from tests.runner.random_service import random_service
from tests.runner.tiny_model import Hand
from tests.runner.tiny_packed import BLOCK_SIZE, kernels_or_skip, write_tiny

STATIC_LENGTH = 48
SHAPE = StepShape(static_length=STATIC_LENGTH, block_size=BLOCK_SIZE)
BUCKETS = (*decode_buckets(4), *mixed_buckets(4, 64))


class EagerStep:
    """A package that isn't compiled."""

    def __init__(self, module: StepModule, bucket: Bucket, runner: ModelRunner) -> None:
        self.bucket = bucket
        self.fault: str | None = None
        self._module, self._caches = module, runner.caches
        self._inputs = StaticInputs.empty(bucket, SHAPE.table_width)

    def run(self, batch: Batch) -> Tensor:
        if self.fault is not None:
            raise RuntimeError(self.fault)
        inputs = self._inputs.fill(batch)
        assert len(inputs[0]) == self.bucket.num_tokens
        assert inputs[5].shape == (self.bucket.num_rows, SHAPE.table_width)
        return self._module(*inputs, self._caches)[: len(batch.input_ids_T)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    kernels_or_skip()
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "model.gguf")
    return EngineConfig(
        model=str(path),
        quantization="gguf",
        device="cpu",
        threads=1,
        block_size=BLOCK_SIZE,
        kv_memory=1 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        compile="off",
        max_model_len=128,
        seed=1,
    )


def compiled_runner(config: EngineConfig, mode: Mode = "full", buckets: tuple[Bucket, ...] = BUCKETS) -> tuple[ModelRunner, dict[str, EagerStep]]:
    runner = ModelRunner(config)
    module = StepModule(runner.model, SHAPE)
    steps = CompiledSteps(mode, runner._general, shape=SHAPE)
    steps.expect(BUCKETS)
    prepared = {bucket.name: EagerStep(module, bucket, runner) for bucket in buckets}
    for step in prepared.values():
        steps.bring(step, source="test")
    runner._steps = steps
    return runner, prepared


def test_the_same_ids_whatever_arrives(config: EngineConfig) -> None:
    plain, (runner, _) = ModelRunner(config), compiled_runner(config)
    for seed in range(3):
        assert random_service(runner, slots=4, seed=seed) == random_service(plain, slots=4, seed=seed)
    status = runner.compile_status()
    assert status.compiled_steps_total > 50
    assert status.general_steps_total > 0, "contexts beyond the static length"
    assert (status.recompiles_total, status.compilations_total) == (0, 0)
    assert {path.state for path in status.paths} == {"compiled"}


def test_padding_is_counted(config: EngineConfig) -> None:
    runner, _ = compiled_runner(config)
    hand = Hand(runner)
    for i in range(3):
        hand.add(str(i), prompt(6, seed=i))
    hand.step({"0": 6})  # 6 tokens in a bucket of 64
    hand.step({"0": 1, "1": 5})  # the same
    hand.step({"1": 1, "2": 6})  # 7
    hand.step({"0": 1, "1": 1, "2": 1})  # 3 rows in a bucket of 4
    status = runner.compile_status()
    assert (status.compiled_steps_total, status.general_steps_total) == (4, 0)
    assert (status.compiled_tokens_total, status.padded_tokens_total) == (6 + 6 + 7 + 3, 58 + 58 + 57 + 1)


def test_padding_touches_no_foreign_block(config: EngineConfig) -> None:
    runner, _ = compiled_runner(config)
    caches = runner.caches
    for keys, values in caches:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    hand = Hand(runner)
    hand.free.reverse()  # block 0, where careless padding would write, is nobody's
    for i in range(3):
        hand.add(str(i), prompt(5, seed=i))
    hand.step({"0": 5, "1": 5, "2": 5})
    hand.step({"0": 1, "1": 1, "2": 1})
    owned = {block for track in hand.tracks.values() for block in track.blocks}
    for keys, values in caches:
        for block in range(runner.num_blocks):
            written = not (keys[block].isnan().all() and values[block].isnan().all())
            assert written == (block in owned), block


def test_a_step_of_another_shape_takes_the_ready_path(config: EngineConfig) -> None:
    runner, _ = compiled_runner(config, buckets=BUCKETS[:2])  # decode-1 and decode-2
    hand = Hand(runner)
    for i in range(3):
        hand.add(str(i), prompt(4, seed=i))
    hand.step({"0": 4, "1": 4, "2": 4})
    hand.step({"0": 1, "1": 1, "2": 1})
    assert runner.compile_status().compiled_steps_total == 0
    hand.step({"0": 1, "1": 1})
    hand.step({"2": 1})
    assert runner.compile_status().compiled_steps_total == 2


def test_contexts_beyond_the_static_length_take_the_ready_path(config: EngineConfig) -> None:
    runner, _ = compiled_runner(config)
    hand = Hand(runner)
    hand.add("a", prompt(STATIC_LENGTH - 1))
    hand.step({"a": STATIC_LENGTH - 1})
    hand.step({"a": 1})
    assert runner.compile_status().general_steps_total == 0
    hand.step({"a": 1})
    assert runner.compile_status().general_steps_total == 1
    assert all(result.error is None for result in hand.tracks["a"].results)


def test_a_package_that_raises_fails_and_the_step_does_not(config: EngineConfig) -> None:
    changes: list[str] = []
    plain, (runner, prepared) = ModelRunner(config), compiled_runner(config)
    runner._steps.on_change = lambda: changes.append(runner.compile_status().state)
    answers = []
    for each in (plain, runner):
        hand = Hand(each)
        hand.add("a", prompt(8))
        hand.step({"a": 8})
        prepared["decode-1"].fault = "a kernel is gone"
        hand.finish(["a"], 6)
        answers.append(hand.tracks["a"].answer)
    assert answers[0] == answers[1]
    status = runner.compile_status()
    assert {path.name: path.reason for path in status.paths if path.state == "failed"} == {"decode-1": "it raised while it ran: a kernel is gone"}
    assert status.reason == "it raised while it ran: a kernel is gone"
    assert changes == ["compiled"]


def test_non_finite_rows_are_computed_again_on_the_ready_path(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, prepared = compiled_runner(config)
    hand = Hand(runner)
    hand.add("a", prompt(8))
    hand.step({"a": 8})
    step = prepared["decode-1"]
    monkeypatch.setattr(step, "run", lambda batch: torch.full((1, runner.model.config.hidden_size), float("nan")))
    (row,) = hand.step({"a": 1})
    assert row.error is None
    assert len(row.token_ids) == 1


def test_what_does_not_pay_is_retired_and_what_pays_stays(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up: compiled steps of one row are slower than the ready path, those of two rows faster."""
    now = [0.0]
    monkeypatch.setattr("headrace.runner.compiled.time.perf_counter", lambda: now[0])
    runner, prepared = compiled_runner(config, mode="auto", buckets=BUCKETS[:2])
    steps = runner._steps
    monkeypatch.setattr(steps, "_trials", Trials(samples=2))
    general, seconds = steps._general, {"decode-1": 3.0, "decode-2": 1.0}

    def slow_general(batch: Batch) -> Tensor:
        now[0] += 2.0
        return general(batch)

    monkeypatch.setattr(steps, "_general", slow_general)
    for name, step in prepared.items():

        def run(batch: Batch, name: str = name, run=step.run) -> Tensor:
            now[0] += seconds[name]
            return run(batch)

        monkeypatch.setattr(step, "run", run)
    hand = Hand(runner)
    for name in ("a", "b"):
        hand.add(name, prompt(4))
        hand.step({name: 4})
    for _ in range(12):
        hand.step({"a": 1})
    for _ in range(12):
        hand.step({"a": 1, "b": 1})
    states = {path.name: path for path in runner.compile_status().paths}
    assert (states["decode-1"].state, states["decode-2"].state) == ("retired", "compiled")
    assert states["decode-1"].reason == "measured on steps of 1 rows: 3000.00 ms compiled, 2000.00 ms on the ready path"
    before = runner.compile_status()
    hand.step({"a": 1})
    hand.step({"a": 1, "b": 1})
    after = runner.compile_status()
    assert after.compiled_steps_total - before.compiled_steps_total == 1
    assert after.general_steps_total - before.general_steps_total == 1


def test_what_torch_compiles_by_itself_counts(config: EngineConfig) -> None:
    runner, _ = compiled_runner(config, buckets=BUCKETS[:1])
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3))
    assert runner.compile_status().recompiles_total == 1


def test_a_compilation_of_a_path_that_had_one_counts_as_again(config: EngineConfig) -> None:
    runner, _ = compiled_runner(config, buckets=BUCKETS[:1])
    steps = runner._steps
    steps.count_compilation(BUCKETS[1])
    assert (runner.compile_status().compilations_total, runner.compile_status().recompiles_total) == (1, 0)
    steps.count_compilation(BUCKETS[0])
    assert (runner.compile_status().compilations_total, runner.compile_status().recompiles_total) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"deterministic": True}, "--deterministic computes in tiles of its own"),
    ],
)
def test_what_cannot_be_compiled_says_why(config: EngineConfig, changes: dict[str, object], reason: str) -> None:
    runner = ModelRunner(replace(config, compile="auto", **changes))  # type: ignore[arg-type]
    runner.start_preparation(lambda: None)
    status = runner.compile_status()
    assert (status.mode, status.state, status.reason, status.paths) == ("auto", "ready", reason, ())
    runner.close()


def test_off_is_off(config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runner.preparation.open_store", lambda url: pytest.fail("no cache is opened"))
    runner = ModelRunner(config)
    runner.start_preparation(lambda: None)
    status = runner.compile_status()
    assert (status.mode, status.state, status.reason, status.paths) == ("off", "ready", None, ())
    runner.close()
