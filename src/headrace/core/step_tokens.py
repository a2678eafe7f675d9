"""What the tokens that a step computed were for."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.draft import PlannedStep
from headrace.core.messages import StepResult
from headrace.core.request import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """They sum to the tokens of the step's plan."""

    useful: int = 0
    recompute: int = 0  # computed before, and lost by preemption
    speculation: int = 0  # guesses that were wrong
    discarded: int = 0  # of requests that had ended when the result came, and of rows that failed


def tokens_of(step: PlannedStep, result: StepResult) -> StepTokens:
    """Ask before the result is taken in: a request that it ends was alive until then."""
    discarded = speculation = 0
    for request, row, sampled in zip(step.requests, step.plan.rows, result.rows, strict=True):
        if request.state is RequestState.FINISHED or sampled.error is not None:
            discarded += row.num_tokens
        else:
            speculation += row.num_speculated and row.num_speculated + 1 - len(sampled.token_ids)
    alive = step.plan.num_tokens - discarded - speculation
    recompute = min(step.num_repeated, alive)
    return StepTokens(useful=alive - recompute, recompute=recompute, speculation=speculation, discarded=discarded)
