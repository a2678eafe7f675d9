"""Who goes first, who gives way, and how a step's prompt tokens are divided. Pure functions of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.core.messages import AddRequest

Rank = tuple[int, float, int]  # (priority class, arrival, seq)
QueueKey = tuple[int, float, int]  # (priority class, due, seq)

PATIENCE_S = 30.0  # a request without a deadline queues as if it had one so many seconds after its arrival
AGING_S_PER_TOKEN = 0.001  # a prompt is overtaken by one that is shorter by N tokens and arrives less than N times this later
AGED_SHARE = 4  # the oldest prompt gets at least one part in so many of a step's prompt tokens
BACKGROUND_CLASS = 1 << 65  # above every priority, which fits 64 bits with its sign
MIN_PREFILL_CHUNK = 8  # prompts advance by so many tokens a step, whatever the latency target


def priority_class(message: AddRequest, policy: Literal["fcfs", "priority"]) -> int:
    """Lower goes first. Under fcfs, `priority` has no say; background work comes after all else under every policy."""
    return (message.priority if policy == "priority" else 0) + (BACKGROUND_CLASS if message.background else 0)


def rank(message: AddRequest, seq: int, policy: Literal["fcfs", "priority"]) -> Rank:
    """Order of age: blocks are taken from the last for the first."""
    return (priority_class(message, policy), message.arrival, seq)


def queue_key(message: AddRequest, seq: int, policy: Literal["fcfs", "priority"]) -> QueueKey:
    """Order in which the queue is left: priority, earliest deadline, then short before long with aging.

    The key never changes while a request waits, so a request is overtaken only by those that arrive within a bounded time after it.
    """
    due = message.deadline
    if due is None:
        due = message.arrival + PATIENCE_S + AGING_S_PER_TOKEN * len(message.prompt_token_ids)
    return (priority_class(message, policy), due, seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNeed:
    """What one running request still has to compute before its next token."""

    num_tokens: int
    rank: Rank
    deadline: float | None
    aged: bool  # it was running in an earlier step already
    served: float  # tokens computed for its tenant, as a virtual counter


def split_prefill(needs: Sequence[PrefillNeed], budget: int, *, aged_share: int, whole: bool = False) -> list[int]:
    """Tokens for each need, in the order of `needs`; their sum is at most `budget`.

    The oldest aged need gets up to `aged_share` first, so that it advances in each step. The rest goes by priority, the
    tenant that has had least, earliest deadline, fewest tokens left. With `whole` a need gets all or nothing, but for one that could never
    fit in a step; oldest first.
    """
    grants = [0] * len(needs)
    by_age = sorted(range(len(needs)), key=lambda i: needs[i].rank)
    if whole:
        for i in by_age:
            if needs[i].num_tokens > budget and any(grants):
                break
            grants[i] = min(needs[i].num_tokens, budget)
            budget -= grants[i]
        return grants
    oldest = next((i for i in by_age if needs[i].aged), None)
    if oldest is not None:
        grants[oldest] = min(needs[oldest].num_tokens, aged_share, budget)
        budget -= grants[oldest]
    for i in sorted(range(len(needs)), key=lambda i: _urgency(needs[i])):
        more = min(needs[i].num_tokens - grants[i], budget)
        grants[i] += more
        budget -= more
    return grants


def _urgency(need: PrefillNeed) -> tuple[int, float, float, int, Rank]:
    return (need.rank[0], need.served, float("inf") if need.deadline is None else need.deadline, need.num_tokens, need.rank)
