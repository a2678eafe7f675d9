"""The scheduler against a slow, plain simulation of its rules where blocks never run out.

The simulation knows no blocks, no slots by number and no plans made ahead: it keeps lists, sorts them anew for each step and takes the first.
Of speculation it knows the answers beforehand, so that it can tell how many guesses are right.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import SpeculativeConfig
from headrace.core.messages import AddRequest
from headrace.core.policy import AGED_SHARE, AGING_S_PER_TOKEN, MIN_PREFILL_CHUNK, PATIENCE_S
from headrace.core.step_time import FIRST_CHUNK
from tests.core.block_world import Engine, config, naive_answer, request

BUDGET, SLOTS = 48, 5
SPECULATION = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
Rows = list[tuple[str, int, int]]  # (id, start, tokens)


@dataclass
class Simulated:
    message: AddRequest
    seq: int
    computed: int = 0
    tokens: int = 0  # prompt and answer so far
    started: int | None = None  # step

    def __post_init__(self) -> None:
        self.whole = [*self.message.prompt_token_ids, *naive_answer(self.message)[0]]

    def guesses(self) -> list[int]:
        """What followed the longest run of last tokens at its latest place before, over and over up to the most guesses."""
        known = self.whole[: self.tokens]
        most = min(SPECULATION.num_speculative_tokens, len(self.whole) - self.tokens - 1)
        for size in range(SPECULATION.prompt_lookup_max, SPECULATION.prompt_lookup_min - 1, -1):
            for place in range(self.tokens - size - 1, -1, -1):
                if known[place : place + size] == known[self.tokens - size :]:
                    period = self.tokens - size - place
                    return [known[place + size + i % period] for i in range(most)]
        return []

    @property
    def left(self) -> int:
        return self.tokens - self.computed

    @property
    def decoding(self) -> bool:
        return self.left == 1

    @property
    def age(self) -> tuple:
        return (self.message.priority, self.message.arrival, self.seq)

    @property
    def place(self) -> tuple:
        due = self.message.arrival + PATIENCE_S + AGING_S_PER_TOKEN * len(self.message.prompt_token_ids)
        return (self.message.priority, self.message.deadline if self.message.deadline is not None else due, self.seq)

    @property
    def urgency(self) -> tuple:
        deadline = float("inf") if self.message.deadline is None else self.message.deadline
        return (self.message.priority, deadline, self.left, self.age)


def simulate(arrivals: dict[int, list[AddRequest]], *, speculates: bool) -> list[Rows]:
    waiting: list[Simulated] = []
    running: list[Simulated] = []
    steps: list[Rows] = []
    seq = 0
    for step in range(10_000):
        for message in arrivals.get(step, []):
            waiting.append(Simulated(message=message, seq=seq, tokens=len(message.prompt_token_ids)))
            seq += 1
        if not waiting and not running:
            if step > max(arrivals, default=0):
                return steps
            continue
        grants: dict[int, int] = {}
        for one in running:
            if one.decoding:
                grants[one.seq] = 1
        num_decodes, decoding = len(grants), set(grants)
        while waiting and len(running) < SLOTS:
            first = min(waiting, key=lambda one: one.place)
            waiting.remove(first)
            running.append(first)
            first.started = step
        budget = BUDGET - num_decodes
        if num_decodes and budget > MIN_PREFILL_CHUNK:
            budget = min(budget, FIRST_CHUNK)
        prompts = [one for one in running if one.seq not in grants]
        share = max(MIN_PREFILL_CHUNK, budget // AGED_SHARE)
        aged = [one for one in prompts if one.started < step]
        if aged:
            oldest = min(aged, key=lambda one: one.age)
            grants[oldest.seq] = min(share, oldest.left, budget)
            budget -= grants[oldest.seq]
        for one in sorted(prompts, key=lambda one: one.urgency):
            more = min(one.left - grants.get(one.seq, 0), budget)
            grants[one.seq] = grants.get(one.seq, 0) + more
            budget -= more
        guesses = {one.seq: one.guesses() if speculates and not any(other.seq not in decoding for other in running) else [] for one in running}
        steps.append([(one.message.request_id, one.computed, grants[one.seq] + len(guesses[one.seq])) for one in running if grants.get(one.seq)])
        for one in running:
            one.computed += grants.get(one.seq, 0)
            if one.computed == one.tokens:
                for guess in [*guesses[one.seq], None]:
                    one.tokens += 1
                    if guess != one.whole[one.tokens - 1]:
                        break
                one.computed = max(one.computed, one.tokens - 1)
        running = [one for one in running if one.tokens < len(one.message.prompt_token_ids) + one.message.params.max_tokens]
    raise AssertionError("the simulation does not end")


arrival = st.fixed_dictionaries(
    {
        "step": st.integers(0, 12),
        "prompt": st.integers(1, 150),
        "max_tokens": st.integers(1, 14),
        "priority": st.integers(0, 1),
        "deadline": st.none() | st.floats(1000.0, 2000.0),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(arrival, min_size=1, max_size=10), st.booleans(), st.booleans())
def test_every_step_is_as_simulated(drawn: list[dict], caching: bool, speculates: bool):
    arrivals: dict[int, list[AddRequest]] = {}
    for i, one in enumerate(sorted(drawn, key=lambda one: one["step"])):
        message = request(f"r{i}", one["prompt"], one["max_tokens"], float(one["step"]), priority=one["priority"], deadline=one["deadline"])
        arrivals.setdefault(one["step"], []).append(message)
    settings_of_engine = config(
        num_blocks=500,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=BUDGET,
        scheduling_policy="priority",
        enable_prefix_caching=caching,
        speculative_config=SPECULATION if speculates else None,
    )
    engine = Engine(settings_of_engine)
    for step in range(10_000):
        for message in arrivals.get(step, []):
            engine.add(message)
        plan = engine.plan()
        if plan is None and step > max(arrivals):
            break
        if plan is not None:
            engine.update(seconds=0.0)  # teaches the step-time model nothing
    expected = simulate(arrivals, speculates=speculates)
    assert [sorted((row.request_id, row.start, row.num_tokens) for row in plan.rows) for plan in engine.plans] == [sorted(rows) for rows in expected]
    engine.check_answers()
    engine.check_at_rest()
