"""Vectors of prompts are those of transformers, whatever the scheduler does and whatever else it serves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig, SchedulerConfig
from headrace.core.messages import AddRequest, Pooling, SchedulerStats, StepPlan
from headrace.core.scheduler import Scheduler
from headrace.runner.batch_inputs import Batch
from headrace.runner.fake import FakeRunner, FakeScript
from headrace.runner.interface import NON_FINITE, Runner
from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from tests.runner.tiny_model import save_tiny_llama

BLOCK = 4
Job = tuple[list[int], Pooling | None]  # None: a request that generates


def jobs(seed: int, vocab_size: int) -> list[Job]:
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(24)]
    prompts = [[*shared[: rng.choice((0, 12, 24))], *(rng.randrange(vocab_size) for _ in range(rng.randrange(1, 30)))] for _ in range(8)]
    prompts += [shared, shared[:1], shared[:BLOCK]]
    kinds: tuple[Pooling | None, ...] = ("last", "mean", None)
    return [(prompt, kind) for prompt in prompts for kind in kinds]


def run(runner: Runner, config: EngineConfig, work: Sequence[Job], *, rounds: int = 1) -> tuple[list[bytes | None], SchedulerStats]:
    """The vector of each job of the last round; a step is planned while one runs."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=runner.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            num_host_blocks=runner.num_host_blocks,
            preemption_mode=config.preemption_mode,
        )
    )
    vectors: dict[str, bytes | None] = {}
    now = 0.0
    for turn in range(rounds):
        for index, (prompt, pooling) in enumerate(work):
            params = SamplingParams(max_tokens=40 if pooling is None else 0, ignore_eos=True)
            message = AddRequest(request_id=f"{turn}-{index}", prompt_token_ids=tuple(prompt), params=params, arrival=now, pooling=pooling)
            assert scheduler.add(message, now) is None
        planned: list[StepPlan] = []
        while scheduler.has_work():
            while len(planned) < 2 and (plan := scheduler.plan(now)) is not None:
                planned.append(plan)
            now += 0.01
            for output in scheduler.update(runner.execute(planned.pop(0)), now):
                if output.finish_reason is not None:
                    assert output.finish_reason == ("length" if output.pooled is None else "stop"), output
                    assert output.request_id not in vectors
                    vectors[output.request_id] = output.pooled
            scheduler.check()
    assert scheduler.stats().num_free_blocks == runner.num_blocks
    return [vectors[f"{rounds - 1}-{index}"] for index in range(len(work))], scheduler.stats()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory)
    return EngineConfig(
        model=str(directory), device="cpu", threads=1, max_num_seqs=8, max_num_batched_tokens=256, block_size=BLOCK, num_gpu_blocks_override=256
    )


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> list[np.ndarray | None]:
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(Path(config.model)).eval()
    vectors: list[np.ndarray | None] = []
    for prompt, pooling in jobs(1, 126):
        with torch.inference_mode():
            states = model(torch.tensor([prompt])).last_hidden_state[0].float()
        vectors.append(None if pooling is None else (states[-1] if pooling == "last" else states.mean(dim=0)).numpy())
    return vectors


SCHEDULES: dict[str, tuple[dict[str, Any], int]] = {
    "batched": ({}, 1),
    "chunked": ({"max_num_batched_tokens": 9}, 1),
    "prefix hits": ({"max_num_batched_tokens": 24}, 2),
    "recompute": ({"num_gpu_blocks_override": 64}, 1),
    "swap": ({"num_gpu_blocks_override": 64, "swap_space": 1 << 20, "preemption_mode": "swap", "max_num_batched_tokens": 12}, 2),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_vectors_are_those_of_transformers(config: EngineConfig, expected: list[np.ndarray | None], schedule: str) -> None:
    changes, rounds = SCHEDULES[schedule]
    config = replace(config, **changes)
    vectors, stats = run(ModelRunner(config), config, jobs(1, 126), rounds=rounds)
    for vector, wanted in zip(vectors, expected, strict=True):
        assert (vector is None) == (wanted is None)
        if vector is not None and wanted is not None:
            np.testing.assert_allclose(np.frombuffer(vector, dtype="<f4"), wanted, atol=1e-4, rtol=0)
    assert rounds == 1 or stats.prefix_hit_tokens_total > 0
    assert schedule not in ("recompute", "swap") or stats.preemptions_recompute_total + stats.preemptions_swap_total > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_fake_counts_every_position_once(seed: int) -> None:
    work = jobs(seed, 250)
    answers = []
    for changes in (
        {"max_num_seqs": 1, "num_gpu_blocks_override": 256},
        {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 8 + seed},
        {"num_gpu_blocks_override": 40, "swap_space": 1, "preemption_mode": "swap", "max_num_batched_tokens": 30},
    ):
        config = EngineConfig(model="fake", **{"max_num_seqs": 8, "block_size": BLOCK, "max_num_batched_tokens": 64, "max_model_len": 110, **changes})  # type: ignore[arg-type]
        answers.append(run(FakeRunner(config, FakeScript()), config, work, rounds=2)[0])
    assert answers[0] == answers[1] == answers[2]
    assert len({vector for vector in answers[0] if vector is not None}) > 10


def test_a_vector_that_is_not_finite_is_an_error_of_its_row_alone(config: EngineConfig) -> None:
    runner = ModelRunner(config)
    forward = runner._forward

    def spoilt(batch: Batch) -> torch.Tensor:
        return forward(batch).masked_fill((batch.input_ids_T == 77)[:, None], float("nan"))

    runner._forward = spoilt  # type: ignore[method-assign]
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=BLOCK, num_blocks=64))
    for name, token in (("good", 5), ("bad", 77)):
        message = AddRequest(request_id=name, prompt_token_ids=(1, 2, token), params=SamplingParams(max_tokens=0), arrival=0.0, pooling="mean")
        assert scheduler.add(message, 0.0) is None
    plan = scheduler.plan(0.0)
    assert plan is not None
    outputs = {output.request_id: output for output in scheduler.update(runner.execute(plan), 0.1)}
    assert outputs["good"].pooled is not None
    assert (outputs["bad"].finish_reason, outputs["bad"].error_message, outputs["bad"].pooled) == ("error", NON_FINITE, None)
