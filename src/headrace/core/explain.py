"""Why a prompt would be found in the prefix cache now, or would not. Nothing is changed by the question: no block is held, no order moves.

What a tenant is told of cached blocks that its prompt does not hit comes from blocks that the tenant itself has sent (see
`core.prefix_journal`), and of blocks under another salt only that they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.core.kv_manager import KVManager
from headrace.core.prefix import PrefixNode, same_prefix

Reason = Literal["cached", "caching_off", "below_one_block", "being_computed", "evicted", "other_salt", "never_seen"]

MAX_SALTS = 16  # other salts that are followed


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One prompt, as a request with it would come."""

    query_id: int  # unique among the open queries of a client
    token_ids: tuple[int, ...]  # at least one
    cache_salt: str | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where the prompt leaves the cached prefix that goes with it longest."""

    position: int  # of the first token that differs
    cached_token_id: int
    prompt_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    query_id: int
    num_tokens: int
    block_size: int
    cached_blocks: int  # full blocks from the start that are found
    cached_tokens: int  # that need no computing: at most all but the last
    reason: Reason  # why the first block that is missing is not there; cached: none is missing
    difference: Difference | None = None  # never_seen: where a prefix of the tenant's own goes on otherwise
    evicted_s: float | None = None  # evicted: so many seconds ago
    awaited_tokens: int | None = None  # being_computed: tokens from the start that will be found once that is done


def explain(kv: KVManager, query: Query, now: float) -> Explanation:
    """What a request with the prompt would find at `now`, in monotonic seconds."""
    token_ids, size = query.token_ids, kv.block_size
    table = kv.new_table(salt=query.cache_salt, tenant=query.tenant)
    num_cached = len(kv.match(table, token_ids))

    def answer(
        reason: Reason, *, difference: Difference | None = None, evicted_s: float | None = None, awaited_tokens: int | None = None
    ) -> Explanation:
        return Explanation(
            query_id=query.query_id,
            num_tokens=len(token_ids),
            block_size=size,
            cached_blocks=num_cached,
            cached_tokens=min(num_cached * size, len(token_ids) - 1),
            reason=reason,
            difference=difference,
            evicted_s=evicted_s,
            awaited_tokens=awaited_tokens,
        )

    if not kv.caching:
        return answer("caching_off")
    if len(token_ids) < size:
        return answer("below_one_block")
    if num_cached == len(token_ids) // size:
        return answer("cached")
    in_flight = kv.in_flight(table, token_ids, num_cached)
    if in_flight is not None:
        return answer("being_computed", awaited_tokens=in_flight.num_tokens)
    missing = kv.chain_node(table, token_ids, num_cached)
    evicted_at = kv.pool.evicted_at(missing)
    if evicted_at is not None and kv.journal.has_used(query.tenant, missing):
        return answer("evicted", evicted_s=max(0.0, now - evicted_at))
    if _cached_under_other_salt(kv, query, num_cached):
        return answer("other_salt")
    return answer("never_seen", difference=_difference(kv, query, missing, num_cached * size))


def _cached_under_other_salt(kv: KVManager, query: Query, num_cached: int) -> bool:
    """Whether another salt of the tenant's finds more than `num_cached` blocks."""
    size = kv.block_size
    first = query.token_ids[:size]
    salts = {
        node.salt
        for node in kv.pool.findable_nodes()
        if node.parent is None and node.token_ids == first and node.salt != query.cache_salt and kv.journal.has_used(query.tenant, node)
    }
    for salt in sorted(salts, key=str)[:MAX_SALTS]:
        table = kv.new_table(salt=salt)
        end = (num_cached + 1) * size
        found = kv.match(table, query.token_ids[:end])
        if len(found) > num_cached and kv.journal.has_used(query.tenant, table.chain[num_cached]):
            return True
    return False


def _difference(kv: KVManager, query: Query, missing: PrefixNode, start: int) -> Difference | None:
    """Of the blocks in the place of `missing`, behind the same tokens, the one that goes with it longest."""
    best: Difference | None = None
    for node in kv.pool.findable_nodes():
        if node.salt != missing.salt or not _same_parent(node, missing) or not kv.journal.has_used(query.tenant, node):
            continue
        offset = next(i for i, (ours, theirs) in enumerate(zip(missing.token_ids, node.token_ids, strict=True)) if ours != theirs)
        position = start + offset
        if position and (best is None or position > best.position):
            best = Difference(position=position, cached_token_id=node.token_ids[offset], prompt_token_id=missing.token_ids[offset])
    return best


def _same_parent(a: PrefixNode, b: PrefixNode) -> bool:
    if a.parent is None or b.parent is None:
        return a.parent is b.parent
    return same_prefix(a.parent, b.parent)
