"""Anything in any order: the scheduler over a block world, driven at random.

The world checks every position that a row attends to; `check()` runs after every step; at the end everything has ended, every block is
free, and every answer is what the request alone would have got.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.config import SpeculativeConfig
from headrace.core.messages import SchedulerStats
from headrace.core.prefix import blake2b_digest
from tests.core.block_world import VOCAB, Engine, config, request

BASE = [7, 7, 3, 9, 1, 4, 4, 0, 2, 8, 5, 6, 11, 12, 13, 14, 15, 16, 17, 18]  # prompts begin alike, so that prefixes are shared

configs = st.builds(
    config,
    num_blocks=st.sampled_from([10, 14, 24, 60]),
    num_host_blocks=st.sampled_from([0, 6, 40]),
    preemption_mode=st.sampled_from(["auto", "recompute", "swap"]),
    max_num_seqs=st.sampled_from([2, 4, 8]),
    max_num_batched_tokens=st.sampled_from([8, 24, 64]),
    enable_chunked_prefill=st.sampled_from([True, True, False]),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    max_num_queued_reqs=st.sampled_from([2, 100]),
    session_lease_s=st.just(0.5),
    speculative_config=st.sampled_from(
        [
            None,
            SpeculativeConfig(prompt_lookup_min=1),
            SpeculativeConfig(num_speculative_tokens=9, prompt_lookup_min=2, prompt_lookup_max=3),
        ]
    ),
)
prompts = st.builds(lambda shared, own: [*BASE[:shared], *own] or [1], st.integers(0, 20), st.lists(st.integers(0, VOCAB - 1), max_size=6))
fields = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 2),
        "tenant": st.sampled_from(["", "", "b"]),
        "cache_salt": st.sampled_from([None, None, None, "salt"]),
        "session_id": st.sampled_from([None, "s"]),
        "eos_token_ids": st.sampled_from([(), (1, 2, 3)]),
        "stop_token_ids": st.sampled_from([(), (4,)]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "background": st.sampled_from([False, False, True]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    engine: Engine
    stats: SchedulerStats

    @initialize(scheduler_config=configs, collide=st.sampled_from([False, False, True]))
    def start(self, scheduler_config, collide: bool) -> None:
        self.engine = Engine(scheduler_config, hash_function=(lambda data: b"same") if collide else blake2b_digest)
        self.stats = self.engine.scheduler.stats()
        self.count = 0
        self.failed = False

    @rule(prompt=prompts, max_tokens=st.integers(0, 14), fields=fields, choices=st.sampled_from([1, 1, 1, 3]), seconds=st.none() | st.floats(0.01, 1))
    def add(self, prompt: list[int], max_tokens: int, fields: dict, choices: int, seconds: float | None) -> None:
        self.count += 1
        engine = self.engine
        for i in range(choices):
            engine.add(
                request(
                    f"{self.count}.{i}",
                    prompt,
                    max_tokens,
                    arrival=engine.now,
                    deadline=None if seconds is None else engine.now + seconds,
                    fork_of=f"{self.count}.0" if i else None,
                    **fields,
                )
            )

    @rule(pick=st.integers(0, 1000), reason=st.sampled_from(["abort", "stop"]))
    def abort(self, pick: int, reason: str) -> None:
        ids = list(self.engine.messages)
        if ids:
            self.engine.abort(ids[pick % len(ids)], reason)

    @precondition(lambda self: len(self.engine.outstanding) < 2)
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.outstanding)
    @rule(seconds=st.sampled_from([0.001, 0.01, 0.2]))
    def update(self, seconds: float) -> None:
        self.engine.update(seconds)

    @rule(steps=st.integers(1, 6), ahead=st.booleans())
    def turn(self, steps: int, ahead: bool) -> None:
        for _ in range(steps):
            self.engine.turn(ahead=ahead)

    @precondition(lambda self: self.engine.outstanding)
    @rule(pick=st.integers(0, 1000))
    def fail_row(self, pick: int) -> None:
        rows = self.engine.outstanding[0].rows
        self.engine.update(failing=frozenset({rows[pick % len(rows)].request_id}))

    @precondition(lambda self: self.engine.outstanding)
    @rule()
    def fail_step(self) -> None:
        self.engine.fail_step()

    @invariant()
    def totals_never_fall(self) -> None:
        after = self.engine.scheduler.stats()
        totals = [name for name in SchedulerStats.__dataclass_fields__ if name.endswith("_total")]
        assert all(getattr(after, name) >= getattr(self.stats, name) for name in totals)
        self.stats = after

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run(max_steps=3000)
            self.engine.check_answers()
            self.engine.check_at_rest()
            assert set(self.engine.first_token_step) <= set(self.engine.messages)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40)
