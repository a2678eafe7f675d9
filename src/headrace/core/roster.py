"""Which request is where: waiting, running in a slot, or preempted. Every change of state goes through here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from headrace.core.policy import Rank
from headrace.core.request import Request, RequestState
from headrace.core.waiting_queue import TenantShares, WaitingQueue


class Roster:
    """`num_slots` rows of the runner's buffers and all live requests, which share `num_blocks`.

    `credit`: tokens by which a tenant that comes may be ahead of others; `weights`: of tenants that are worth more or less than 1.
    """

    def __init__(self, num_slots: int, *, num_blocks: int, credit: int, weights: Mapping[str, float]) -> None:
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.shares = TenantShares(
            credit=credit, weights=weights
        )  # charged with a whole prompt when it starts, and with each new token: who leaves the queue
        self.computed = TenantShares(credit=credit, weights=weights)  # charged with positions when they are planned: whose prompts advance
        self.waiting = WaitingQueue(self.shares)
        self.running: list[Request] = []  # sorted by rank
        self.preempted: list[Request] = []  # PREEMPTED and SWAPPED, sorted by rank
        self._by_id: dict[str, Request] = {}
        self._free_slots = list(range(num_slots))
        self._num_swapped = 0
        self._num_background = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    @property
    def num_swapped(self) -> int:
        return self._num_swapped

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_foreground(self) -> int:
        """Live requests that somebody waits for."""
        return len(self._by_id) - self._num_background

    def is_part(self, tenant: str, num_slots: int, num_blocks: int) -> bool:
        """Whether so many slots or blocks are as much as the tenant, which is in the engine, may have whatever the others want."""
        part = self.shares.part(tenant)
        return num_slots >= max(1, int(self.num_slots * part)) or num_blocks >= int(self.num_blocks * part)

    def charge_computed(self, request: Request, num_tokens: int) -> None:
        """So many more positions are planned; those that were computed before a preemption are not charged again."""
        num_repeated = request.num_computed_before - request.num_computed
        self.computed.charge(request.message.tenant, num_tokens if num_repeated <= 0 else max(0, num_tokens - num_repeated))

    def slots_of(self, tenant: str) -> int:
        return sum(request.message.tenant == tenant for request in self.running)

    def holds_part(self, tenant: str) -> bool:
        """Whether the tenant has its part of the slots or of the blocks at least."""
        tables = [request.table.blocks for request in self.running if request.message.tenant == tenant]
        return self.is_part(tenant, len(tables), sum(len(blocks) for blocks in tables))

    def is_owed(self, tenant: str, other: str) -> bool:
        """Whether the tenant has less than its part and no more tokens than the other one, which has its part at least."""
        fewer = self.shares.served(tenant) <= self.shares.served(other)
        return tenant != other and fewer and self.holds_part(other) and not self.holds_part(tenant)

    def num_queued_with_one_more(self) -> int:
        """Requests beyond those that could run at once right now, if one more came. The forks of a request (n > 1) are a part of it.

        Background requests count as if they were not there: they give their places to all others.
        """
        running, preempted, waiting = len(self.running), len(self.preempted), len(self.waiting)
        if self._num_background:
            running, preempted, waiting = (sum(not request.background for request in place) for place in (self.running, self.preempted, self.waiting))
        room = max(0, self.num_slots - running - preempted - self.waiting.num_forks)
        return max(0, waiting - self.waiting.num_forks + 1 - room)

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        assert request.request_id not in self._by_id
        self._by_id[request.request_id] = request
        self._num_background += request.background
        self.shares.join(request.message.tenant)
        self.computed.join(request.message.tenant)
        self.waiting.push(request)

    def start(self, request: Request) -> None:
        """The request takes a slot."""
        self._leave_place(request)
        request.move_to(RequestState.RUNNING)
        request.slot = heappop(self._free_slots)
        request.needs_start = True
        request.num_sent_blocks = 0
        insort(self.running, request, key=_rank)

    def preempt(self, request: Request, state: RequestState) -> None:
        """The request gives its slot back and goes to PREEMPTED or SWAPPED."""
        self._leave_place(request)
        request.move_to(state)
        self._num_swapped += state is RequestState.SWAPPED
        insort(self.preempted, request, key=_rank)

    def finish(self, request: Request) -> None:
        self._leave_place(request)
        request.move_to(RequestState.FINISHED)
        del self._by_id[request.request_id]
        self._num_background -= request.background
        self.shares.leave(request.message.tenant)
        self.computed.leave(request.message.tenant)

    def _leave_place(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        elif request.state is RequestState.RUNNING:
            _remove(self.running, request)
            heappush(self._free_slots, request.slot)
            request.slot = -1
        else:
            _remove(self.preempted, request)
            self._num_swapped -= request.state is RequestState.SWAPPED

    def check(self) -> None:
        self.waiting.check()
        places = [*self.waiting, *self.running, *self.preempted]
        assert len(places) == len(self._by_id)
        assert {id(request) for request in places} == {id(request) for request in self._by_id.values()}
        assert all(request.state is RequestState.WAITING for request in self.waiting)
        assert all(request.state is RequestState.RUNNING for request in self.running)
        assert all(request.state in (RequestState.PREEMPTED, RequestState.SWAPPED) for request in self.preempted)
        assert self.running == sorted(self.running, key=_rank)
        assert self.preempted == sorted(self.preempted, key=_rank)
        assert self._num_background == sum(request.background for request in places)
        assert self._num_swapped == sum(request.state is RequestState.SWAPPED for request in self.preempted)
        assert sorted([*self._free_slots, *(request.slot for request in self.running)]) == list(range(self.num_slots))
        heap = self._free_slots.copy()
        heapify(heap)
        assert heap == self._free_slots
        for request in places:
            request.check()


def _rank(request: Request) -> Rank:
    return request.rank


def _remove(requests: list[Request], request: Request) -> None:
    index = bisect_left(requests, request.rank, key=_rank)
    assert requests[index] is request
    del requests[index]
