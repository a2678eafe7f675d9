"""Whether a request may come in at all, and which waiting one may start now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

from headrace.config import SchedulerConfig
from headrace.core.draft import PlanDraft
from headrace.core.kv_manager import BlockPairs, KVManager
from headrace.core.messages import AddRequest
from headrace.core.prefix_misses import PrefixMisses
from headrace.core.request import Request, RequestState
from headrace.core.roster import Roster

RESERVE_SHARE = 16  # new requests leave one block in so many free for those that run, at most one for each of them


def limit_refusal(message: AddRequest, config: SchedulerConfig) -> tuple[str, str] | None:
    """(error code, message) for a request that could never run."""
    num_prompt = len(message.prompt_token_ids)
    max_tokens = message.params.max_tokens
    if num_prompt == 0:
        return "invalid_value", "The prompt has no tokens; send at least one."
    num_answer = 1 if max_tokens is None else max_tokens
    total = num_prompt + num_answer
    parts = f"{num_prompt} in the prompt and {num_answer} to generate"
    if total > config.max_model_len:
        return "context_length_exceeded", (
            f"The request asks for {total} tokens ({parts}), but the context holds {config.max_model_len}. Shorten the prompt or lower max_tokens."
        )
    num_blocks = -(-total // config.block_size)
    if num_blocks > config.num_blocks:
        return "context_length_exceeded", (
            f"The request needs {num_blocks} KV blocks for {total} tokens ({parts}), but the KV cache has {config.num_blocks} blocks of "
            f"{config.block_size} tokens: at most {config.num_blocks * config.block_size} tokens fit. Shorten the prompt, lower max_tokens "
            "or start the server with more --kv-memory."
        )
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        return "context_length_exceeded", (
            f"The prompt has {num_prompt} tokens, but without chunked prefill it must fit in one step of {config.max_num_batched_tokens}. "
            "Shorten the prompt or start the server with chunked prefill or a larger --max-num-batched-tokens."
        )
    return None


def max_total_tokens(message: AddRequest, config: SchedulerConfig) -> int:
    """Prompt and answer at most. Without max_tokens: up to the end of the context, or of the KV cache where that is smaller."""
    if message.params.max_tokens is None:
        return min(config.max_model_len, config.num_blocks * config.block_size)
    return len(message.prompt_token_ids) + message.params.max_tokens


def tokens_needed(request: Request, wanted: dict[int, int]) -> int:
    """Tokens to compute now: all, or where others wait for a part of its prompt, up to the end of that part."""
    more = wanted.get(id(request.table), 0) - request.num_computed
    return min(request.num_remaining, more) if more > 0 else request.num_remaining


class _Outcome(Enum):
    STARTED = 1
    PASSED_OVER = 2  # it waits for another request; those behind it may go first
    NO_ROOM = 3  # those behind it wait too, so that it is not starved


class Admission:
    def __init__(self, config: SchedulerConfig, roster: Roster, kv: KVManager) -> None:
        self._config = config
        self._roster = roster
        self._kv = kv
        self.prompt_tokens = 0  # totals; never fall
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.prefix_misses = PrefixMisses()

    def start_waiting(self, draft: PlanDraft, *, background: bool, kept: Callable[[str], bool] | None = None) -> dict[int, int]:
        """Start what may start now: preempted requests from the oldest on, then the queue in its order. `background`: such requests too.
        `kept`: whether what is free is kept from a tenant.

        Returns, for requests that compute a prefix others wait for, by the id() of their block table, how many tokens from the start those want.
        """
        wanted: dict[int, int] = {}
        for request in self._candidates():
            if not self._roster.num_free_slots or (request.background and not background):
                break  # background requests come after all others
            if kept is not None and kept(request.message.tenant):
                if len(self._roster.shares) == 1:
                    break
                continue
            outcome = self._try_start(request, draft)
            if outcome is _Outcome.NO_ROOM:
                break
            if outcome is _Outcome.PASSED_OVER and request.waits_for is not None:
                holder = id(request.waits_for.holder)
                wanted[holder] = max(wanted.get(holder, 0), request.waits_for.num_tokens)
        return wanted

    def _candidates(self) -> Iterator[Request]:
        waiting = self._roster.waiting.scan()
        head = next(waiting, None)
        for request in tuple(self._roster.preempted):
            while head is not None and self._goes_before(head, request):
                yield head
                head = next(waiting, None)
            if not request.num_pending:  # it just made way, and is computed again from a token that is still on its way
                yield request
        while head is not None:
            yield head
            head = next(waiting, None)

    def _goes_before(self, head: Request, preempted: Request) -> bool:
        """Of a more urgent priority class, or of a tenant to whom the other's owes the slot."""
        if head.rank[0] != preempted.rank[0] or head.background:
            return head.rank[0] < preempted.rank[0]
        return self._roster.is_owed(head.message.tenant, preempted.message.tenant)

    def _try_start(self, request: Request, draft: PlanDraft) -> _Outcome:
        parent = self._fork_parent(request)
        if parent is not None and not _can_fork(parent, draft):
            return _Outcome.PASSED_OVER
        if self._waits_for_prefix(request, parent):
            return _Outcome.PASSED_OVER
        num_running = len(self._roster.running)
        reserve = min(num_running, self._kv.pool.num_blocks // RESERVE_SHARE)
        if request.state is RequestState.SWAPPED:
            pairs = self._kv.swap_in(request.table, request.token_ids, reserve=reserve)
            if pairs is None:
                return _Outcome.NO_ROOM
            draft.swap_in.extend(pairs)
        else:
            taken = self._take_blocks(request, parent, reserve)
            if taken is None:
                return _Outcome.NO_ROOM
            request.num_computed, copies = taken
            draft.copies.extend(copies)
            if request.num_cached is None:
                self._count_first_start(request)
        request.admitted_step = draft.step_id
        self._roster.start(request)
        return _Outcome.STARTED

    def _take_blocks(self, request: Request, parent: Request | None, reserve: int) -> tuple[int, BlockPairs] | None:
        if parent is not None:
            return self._kv.fork(parent.table, request.table, request.num_prompt, reserve=reserve)
        return self._kv.take(request.table, request.token_ids, read_cache=not request.needs_every_position, reserve=reserve)

    def _fork_parent(self, request: Request) -> Request | None:
        """The live request whose prompt blocks this one shares when it first starts."""
        message = request.message
        if message.fork_of is None or request.state is not RequestState.WAITING or request.needs_every_position:
            return None
        parent = self._roster.get(message.fork_of)
        if parent is None or parent.message.prompt_token_ids != message.prompt_token_ids or parent.message.cache_salt != message.cache_salt:
            return None
        return parent

    def _waits_for_prefix(self, request: Request, parent: Request | None) -> bool:
        if parent is not None or request.state is RequestState.SWAPPED or request.needs_every_position:
            return False
        if request.waits_for is not None and self._kv.still_in_flight(request.waits_for):
            return True
        num_matched = len(self._kv.match(request.table, request.token_ids))
        request.waits_for = self._kv.in_flight(request.table, request.token_ids, num_matched)
        return request.waits_for is not None

    def _count_first_start(self, request: Request) -> None:
        request.num_cached = request.num_computed
        self._roster.shares.charge(request.message.tenant, request.num_prompt - request.num_cached)
        self.prompt_tokens += request.num_prompt
        if self._config.enable_prefix_caching and not request.needs_every_position:
            self.prefix_query_tokens += request.num_prompt
            self.prefix_hit_tokens += request.num_cached
            table = request.table
            self.prefix_misses.note(
                request.message.prompt_token_ids,
                num_cached=request.num_cached,
                salt=table.salt,
                chain=table.chain,
                block_size=self._kv.block_size,
                pool=self._kv.pool,
            )


def _can_fork(parent: Request, draft: PlanDraft) -> bool:
    """Whether plans before this one fill the parent's prompt blocks; copies run before rows, and only from blocks that nothing copies to.

    A parent that is computed again after a preemption gets more of its row after this, and must not find the block to copy from shared.
    """
    if parent.state is not RequestState.RUNNING or parent.num_computed < parent.num_prompt or parent.admitted_step == draft.step_id:
        return False
    row = draft.rows.get(parent)
    return parent.num_remaining <= 1 if row is None else row.sample and row.start >= parent.num_prompt - 1
