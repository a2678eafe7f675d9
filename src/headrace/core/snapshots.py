"""How a scheduler stands, in numbers."""

from __future__ import annotations

from headrace.core.admission import Admission
from headrace.core.kv_manager import KVManager
from headrace.core.messages import SchedulerStats
from headrace.core.preemption import Preemption
from headrace.core.roster import Roster
from headrace.core.speculation import Speculation


class Snapshots:
    """Of one scheduler. Each one also samples how full the blocks are that requests hold."""

    def __init__(self, kv: KVManager, roster: Roster, admission: Admission, preemption: Preemption, speculation: Speculation | None) -> None:
        self._kv = kv
        self._roster = roster
        self._admission = admission
        self._preemption = preemption
        self._speculation = speculation
        self._sampled_positions = self._unused_positions = 0

    def take(self, *, generation_tokens: int, recomputed_tokens: int) -> SchedulerStats:
        """The arguments are totals."""
        roster, pool, speculation = self._roster, self._kv.pool, self._speculation
        misses = self._admission.prefix_misses.totals
        size = self._kv.block_size
        self._sampled_positions += (pool.num_blocks - pool.num_free) * size
        self._unused_positions += sum(max(0, len(request.table.blocks) * size - len(request.token_ids)) for request in roster.running)
        return SchedulerStats(
            num_running=len(roster.running),
            num_waiting=len(roster.waiting) + len(roster.preempted) - roster.num_swapped,
            num_swapped=roster.num_swapped,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_findable,
            num_evictable_blocks=pool.num_evictable,
            prompt_tokens_total=self._admission.prompt_tokens,
            generation_tokens_total=generation_tokens,
            prefix_query_tokens_total=self._admission.prefix_query_tokens,
            prefix_hit_tokens_total=self._admission.prefix_hit_tokens,
            prefix_miss_new_tokens_total=misses.new,
            prefix_miss_evicted_tokens_total=misses.evicted,
            prefix_miss_other_salt_tokens_total=misses.other_salt,
            prefix_miss_partial_tokens_total=misses.partial,
            kv_sampled_positions_total=self._sampled_positions,
            kv_unused_positions_total=self._unused_positions,
            preemptions_recompute_total=self._preemption.num_recomputes,
            preemptions_swap_total=self._preemption.num_swaps,
            recomputed_tokens_total=recomputed_tokens,
            spec_drafts_total=0 if speculation is None else speculation.num_drafts,
            spec_draft_tokens_total=0 if speculation is None else speculation.num_draft_tokens,
            spec_accepted_tokens_total=0 if speculation is None else speculation.num_accepted_tokens,
            spec_rejected_tokens_total=0 if speculation is None else speculation.num_draft_tokens - speculation.num_accepted_tokens,
        )
