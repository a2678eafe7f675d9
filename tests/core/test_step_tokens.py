"""What the tokens of a step were for; they are never more and never less than the step computed."""

from __future__ import annotations

from headrace.config import SpeculativeConfig
from headrace.core.step_tokens import StepTokens
from tests.core.block_world import Engine, config, next_token, request


class Counted(Engine):
    """Keeps what each step's tokens were for."""

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)  # type: ignore[arg-type]
        self.counted: list[StepTokens] = []

    def update(self, *args: object, **fields: object) -> None:  # type: ignore[override]
        plan = self.outstanding[0]
        super().update(*args, **fields)  # type: ignore[arg-type]
        tokens = self.scheduler.step_tokens
        assert tokens.useful + tokens.recompute + tokens.speculation + tokens.discarded == plan.num_tokens
        assert min(tokens.useful, tokens.recompute, tokens.speculation, tokens.discarded) >= 0
        self.counted.append(tokens)

    def total(self, kind: str) -> int:
        return sum(getattr(tokens, kind) for tokens in self.counted)


def test_all_of_a_plain_request_is_useful():
    engine = Counted(config())
    engine.add(request("a", 5, 3))
    engine.run()
    assert engine.counted == [StepTokens(useful=5), StepTokens(useful=1), StepTokens(useful=1)]


def test_the_step_planned_ahead_of_an_end_is_discarded():
    prompt = [1, 2, 3]
    engine = Counted(config())
    engine.add(request("a", prompt, 8, eos_token_ids=(next_token(prompt),)))
    engine.run()
    assert engine.counted == [StepTokens(useful=3), StepTokens(discarded=1)]


def test_an_aborted_request_and_a_row_that_failed_are_discarded():
    engine = Counted(config())
    engine.add(request("a", 5, 8))
    engine.add(request("b", 7, 8))
    engine.plan()
    engine.abort("a")
    engine.update(failing=frozenset({"b"}))
    assert engine.counted == [StepTokens(discarded=12)]


def test_what_preemption_lost_is_computed_again():
    engine = Counted(config(num_blocks=16, block_size=4, preemption_mode="recompute"))
    for name in "abcd":
        engine.add(request(name, 10, 20))
    engine.run()
    engine.check_answers()
    assert engine.total("recompute") == engine.scheduler.stats().recomputed_tokens_total > 0
    assert engine.total("useful") == 4 * (10 + 20 - 1)


def test_wrong_guesses_are_counted_and_right_ones_are_useful():
    engine = Counted(config(speculative_config=SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)))
    for name in "abc":
        engine.add(request(name, [1, 2, 3, 4] * 5, 60))
    engine.run()
    engine.check_answers()
    stats = engine.scheduler.stats()
    assert stats.spec_accepted_tokens_total > 0
    assert engine.total("speculation") == stats.spec_rejected_tokens_total > 0
