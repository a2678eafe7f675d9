"""How many prompt tokens a step may hold beside what stands in its draft already."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import SchedulerConfig
from headrace.core.draft import PlanDraft
from headrace.core.policy import MIN_PREFILL_CHUNK
from headrace.core.request import Request
from headrace.core.step_time import StepTimeModel


def prompt_budget(prompts: Sequence[Request], draft: PlanDraft, config: SchedulerConfig, step_time: StepTimeModel, *, step_s: float | None) -> int:
    """`step_s`: what the whole step may take, in seconds; None: as long as the decodes in it bear."""
    budget = config.max_num_batched_tokens - draft.num_tokens
    beside, context = draft.work, max(request.num_computed for request in prompts)

    def chunk(target_s: float | None) -> int:
        return step_time.prefill_chunk(
            beside,
            num_prompts=len(prompts),
            context=context,
            limit=budget,
            floor=MIN_PREFILL_CHUNK,
            target_s=target_s,
        )

    target_s = None if config.target_itl_ms is None else config.target_itl_ms / 1000
    if step_s is not None:
        return chunk(step_s if target_s is None or not draft.rows else min(target_s, step_s))
    return chunk(target_s) if draft.rows else budget
