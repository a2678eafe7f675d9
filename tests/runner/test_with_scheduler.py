"""The same-ids law with the real scheduler: whatever it does to the requests, greedy ids are those of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from headrace.core.messages import AddRequest, SchedulerStats, StepPlan
from headrace.core.scheduler import Scheduler
from headrace.runner.fake import FakeRunner, FakeScript
from headrace.runner.interface import Runner
from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from tests.runner.tiny_model import EOS, greedy_reference, save_tiny_llama

NEW = 16
BLOCK = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory)
    return EngineConfig(
        model=str(directory), device="cpu", threads=1, max_num_seqs=8, max_num_batched_tokens=256, block_size=BLOCK, num_gpu_blocks_override=256
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(9)
    shared = [rng.randrange(126) for _ in range(24)]
    return [
        *([rng.randrange(126) for _ in range(rng.randrange(1, 45))] for _ in range(8)),
        *([*shared, *(rng.randrange(126) for _ in range(rng.randrange(1, 20)))] for _ in range(6)),
        shared,
        shared,
    ]


@pytest.fixture(scope="module")
def expected(config: EngineConfig, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(Path(config.model)).eval()
    return [greedy_reference(model, prompt, NEW) for prompt in prompts]


def run(
    runner: Runner, config: EngineConfig, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, ahead: bool, rounds: int = 1
) -> tuple[list[list[int]], SchedulerStats]:
    """Answers of all prompts, sent `rounds` times; those of the last round count. With `ahead` a step is planned while one runs."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=runner.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            num_host_blocks=runner.num_host_blocks,
            preemption_mode=config.preemption_mode,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            speculative_config=config.speculative_config,
        )
    )
    answers: dict[str, list[int]] = {}
    now = 0.0
    for turn in range(rounds):
        for index, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
            name = f"{turn}-{index}"
            answers[name] = []
            message = AddRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                params=options,
                arrival=now,
                eos_token_ids=() if options.ignore_eos else EOS,
                fork_of=f"{turn}-{index - options.choice_index}" if options.choice_index else None,
            )
            assert scheduler.add(message, now) is None
        planned: list[StepPlan] = []
        while scheduler.has_work():
            while len(planned) < 1 + ahead and (plan := scheduler.plan(now)) is not None:
                planned.append(plan)
            result = runner.execute(planned.pop(0))
            now += 0.01
            for output in scheduler.update(result, now):
                assert output.finish_reason in (None, "length", "stop"), output
                answers[output.request_id] += output.token_ids
            scheduler.check()
    assert scheduler.stats().num_free_blocks == runner.num_blocks
    return [answers[f"{rounds - 1}-{index}"] for index in range(len(prompts))], scheduler.stats()


SPECULATION = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
SCHEDULES: dict[str, tuple[dict[str, Any], int]] = {
    "one at a time": ({"max_num_seqs": 1, "enable_prefix_caching": False}, 1),
    "batched": ({}, 1),
    "chunked": ({"max_num_batched_tokens": 8}, 1),
    "not chunked": ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, 1),
    "prefix hits": ({}, 2),
    "recompute": ({"num_gpu_blocks_override": 40}, 1),
    "swap": ({"num_gpu_blocks_override": 40, "swap_space": 64 * 2048, "preemption_mode": "swap"}, 1),
    "speculation": ({"speculative_config": SPECULATION}, 1),
    "speculation and recompute": ({"speculative_config": SPECULATION, "num_gpu_blocks_override": 40}, 2),
    "swap and prefix hits": ({"num_gpu_blocks_override": 40, "swap_space": 64 * 2048, "preemption_mode": "swap", "max_num_batched_tokens": 24}, 2),
}


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_ids_are_those_of_transformers(
    config: EngineConfig, prompts: list[list[int]], expected: list[list[int]], schedule: str, ahead: bool
) -> None:
    changes, rounds = SCHEDULES[schedule]
    config = replace(config, **changes)
    answers, stats = run(ModelRunner(config), config, prompts, [GREEDY] * len(prompts), ahead=ahead, rounds=rounds)
    assert answers == expected
    assert bool(stats.preemptions_swap_total) == schedule.startswith("swap")
    assert "recompute" not in schedule or stats.preemptions_recompute_total > 0
    assert bool(stats.spec_draft_tokens_total) == ("speculation" in schedule)
    if rounds == 2:
        assert stats.prefix_hit_tokens_total > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_forks_and_seeds_do_not_depend_on_the_schedule(config: EngineConfig, prompts: list[list[int]], ahead: bool) -> None:
    params = [SamplingParams(n=4, temperature=1.1, top_p=0.95, seed=3, max_tokens=NEW, choice_index=index) for index in range(4)]
    forked = [prompt for prompt in prompts[:4] for _ in range(4)]
    alone = replace(config, max_num_seqs=1, enable_prefix_caching=False)
    wanted, _ = run(ModelRunner(alone), alone, forked, params * 4, ahead=False)
    assert len({tuple(answer) for answer in wanted}) == len(wanted)
    for changes in ({}, {"num_gpu_blocks_override": 30}, {"max_num_batched_tokens": 16}, {"speculative_config": SPECULATION}):
        changed = replace(config, **changes)
        assert run(ModelRunner(changed), changed, forked, params * 4, ahead=ahead)[0] == wanted


@pytest.mark.parametrize("seed", range(6))
def test_the_fake_agrees_with_the_scheduler(seed: int) -> None:
    """Its checks of every attended position hold under every schedule, and its answers do not depend on it."""
    rng = random.Random(seed)
    shared = [rng.randrange(250) for _ in range(30)]
    prompts = [[*shared[: rng.choice((0, 8, 30))], *(rng.randrange(250) for _ in range(rng.randrange(1, 30)))] for _ in range(30)]
    params = [SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(9), max_tokens=rng.randrange(1, 40)) for _ in prompts]
    answers = []
    for changes in (
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": rng.randrange(30, 60), "max_num_batched_tokens": rng.randrange(8, 80)},
        {"num_gpu_blocks_override": rng.randrange(30, 60), "swap_space": 1, "preemption_mode": "swap"},
        {"num_gpu_blocks_override": rng.randrange(30, 60), "swap_space": 1, "speculative_config": SPECULATION},
    ):
        config = EngineConfig(model="fake", **{"max_num_seqs": 8, "block_size": BLOCK, "max_num_batched_tokens": 64, "max_model_len": 110, **changes})  # type: ignore[arg-type]
        runner = FakeRunner(config, FakeScript(echo=3))
        answer, stats = run(runner, config, prompts, params, ahead=seed % 2 == 1, rounds=2)
        answers.append(answer)
        assert (stats.spec_accepted_tokens_total > 20) == (config.speculative_config is not None)
    assert answers[0] == answers[1] == answers[2] == answers[3]
