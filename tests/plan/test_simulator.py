from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from headrace.bench.traces import TracedRequest, load_trace
from headrace.config import SchedulerConfig
from headrace.core.step_work import StepWork
from headrace.plan.costs import Sample
from headrace.plan.simulator import Delays, SimulatedEngine
from tests.plan.virtual_core import VirtualCore


@dataclass(frozen=True)
class LinearCosts:
    step: float = 0.010
    token: float = 0.001
    context: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return self.step + self.token * work.tokens + self.context * (work.decode_attended + work.prompt_attended)


def config(**changes: object) -> SchedulerConfig:
    values = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 200}
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def request(arrival: float, prompt: int, output: int, **rest: object) -> TracedRequest:
    return TracedRequest(arrival=arrival, num_prompt_tokens=prompt, num_output_tokens=output, **rest)  # type: ignore[arg-type]


def some_requests(count: int, seed: int) -> list[TracedRequest]:
    draw = random.Random(seed)
    requests, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(8.0)
        shared = draw.choice((0, 0, 12))
        prefix = {"prefix": draw.choice("ab"), "num_prefix_tokens": shared} if shared else {}
        requests.append(request(now, shared + draw.randint(1, 40), draw.randint(1, 20), **prefix))
    return requests


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("changes", [{}, {"num_blocks": 22}, {"max_num_seqs": 2, "target_itl_ms": 30.0}], ids=["plenty", "few blocks", "few slots"])
def test_the_times_are_those_of_the_engine_loop(changes: dict[str, object], async_scheduling: bool) -> None:
    requests, costs = some_requests(25, seed=len(changes)), LinearCosts(context=1e-5)
    real = VirtualCore(config(**changes), costs, requests, async_scheduling=async_scheduling).run()
    replay = SimulatedEngine(config(**changes), costs, Delays(), async_scheduling=async_scheduling).run(requests)
    assert [(outcome.first, outcome.last, outcome.num_output_tokens) for outcome in replay.outcomes] == [(at[0], at[-1], len(at)) for at in real]
    assert sorted(replay.gaps) == sorted(later - earlier for at in real for earlier, later in itertools.pairwise(at))
    assert bool(replay.preemptions) == ("num_blocks" in changes)
    assert sum(outcome.num_cached_tokens for outcome in replay.outcomes) > 0


def test_one_request_alone() -> None:
    """A step for the prompt, then one for each further token; delays lie around them."""
    delays = Delays(handoff=0.5, before=1.0, before_token=0.1, after=2.0)
    replay = SimulatedEngine(config(), LinearCosts(), delays).run([request(10.0, 20, 3)])
    [outcome] = replay.outcomes
    assert outcome.first == pytest.approx(10.0 + 1.0 + 2.0 + 0.5 + 0.030 + 2.0)
    assert list(replay.gaps) == pytest.approx([0.511, 0.511])
    assert (replay.steps, replay.step_tokens, replay.busy) == (3, 22, pytest.approx(0.052))
    assert (replay.peak_blocks, outcome.num_output_tokens, outcome.ok) == (6, 3, True)


def test_a_prompt_that_comes_behind_a_planned_step_waits_for_it() -> None:
    replay = SimulatedEngine(config(), LinearCosts(), Delays()).run([request(0.0, 1, 50), request(0.0111, 1, 1)])
    first, second = replay.outcomes
    assert first.first == pytest.approx(0.011)
    assert second.first == pytest.approx(3 * 0.011 + 0.012), "it comes in the second step, the third is planned, and the fourth has both"


def test_the_scheduler_knows_what_it_learned_before() -> None:
    """Steps of 64 prompt tokens that cost next to nothing: so a prompt beside a decode needs fewer steps than where none was seen."""
    known = [Sample(StepWork(1, 20, tokens, 0, 1), 0.011) for tokens in (0, 64) * 20]
    requests = [request(0.0, 4, 30), request(0.05, 200, 1)]
    steps = [SimulatedEngine(config(), LinearCosts(token=1e-5), Delays(), known=before).run(requests).outcomes[1].last for before in ([], known)]
    assert steps[1] < steps[0]


def test_what_can_never_run_is_refused() -> None:
    full = config(max_num_queued_reqs=1, max_num_seqs=1)
    replay = SimulatedEngine(full, LinearCosts(), Delays()).run([request(0.0, 300, 5), *(request(1.0 + i / 1e6, 4, 4) for i in range(4))])
    assert [outcome.error for outcome in replay.outcomes] == ["context_length_exceeded", None, None, "queue_full", "queue_full"]


def test_a_shared_prefix_is_computed_once() -> None:
    requests = [request(float(i), 40, 2, prefix="p", num_prefix_tokens=32) for i in range(3)]
    replay = SimulatedEngine(config(), LinearCosts(), Delays()).run(requests)
    assert [outcome.num_cached_tokens for outcome in replay.outcomes] == [0, 32, 32]


def test_without_a_prefix_the_cache_changes_nothing() -> None:
    trace = load_trace("poisson:rate=20,prompt=30,output=10,requests=60,sigma=0.5")
    with_cache, without = (
        SimulatedEngine(config(enable_prefix_caching=caching), LinearCosts(), Delays()).run(trace.requests) for caching in (True, False)
    )
    assert [outcome.last for outcome in with_cache.outcomes] == [outcome.last for outcome in without.outcomes]


def test_a_step_after_a_pause_is_cold() -> None:
    engine = SimulatedEngine(config(), LinearCosts(), Delays(cold=lambda idle: 0.1 * idle))
    outcomes = engine.run([request(0.5, 4, 2), request(1.0, 4, 1), request(1.0, 4, 1)]).outcomes
    begin = 0.5 + 0.014 + 0.05
    assert outcomes[0].first == pytest.approx(begin), "half a second without a step"
    assert outcomes[0].last == pytest.approx(begin + 0.011), "at once behind another"
    assert outcomes[1].first == outcomes[2].first == pytest.approx(1.0 + 0.018 + 0.1 * (1.0 - begin - 0.011))
