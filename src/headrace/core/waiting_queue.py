"""Requests that wait to run for the first time: fair between tenants, and in queue order within one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from headrace.core.request import Request


class TenantShares:
    """Tokens served to each tenant, divided by its weight, as virtual counters: whoever waits with the smallest goes first.

    A tenant that comes back is lifted to `credit` tokens below the smallest counter among the present ones: enough for a short burst, and
    nobody saves up more service by staying away.
    """

    def __init__(self, *, credit: int = 0, weights: Mapping[str, float] | None = None) -> None:
        self._credit = credit
        self._weights = weights or {}
        self._served: dict[str, float] = {}
        self._num_present: dict[str, int] = {}

    def __len__(self) -> int:
        """How many tenants have requests in the engine."""
        return len(self._num_present)

    def __iter__(self) -> Iterator[str]:
        return iter(self._num_present)

    def join(self, tenant: str) -> None:
        """One more request of this tenant is in the engine."""
        if tenant not in self._num_present:
            floor = min((self._served[present] for present in self._num_present), default=self._credit)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor - self._credit)
        self._num_present[tenant] = self._num_present.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        self._num_present[tenant] -= 1
        if not self._num_present[tenant]:
            del self._num_present[tenant]
        if not self._num_present:
            self._served.clear()  # nobody is owed anything by an idle engine

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] += num_tokens / self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        return self._served[tenant]

    def part(self, tenant: str) -> float:
        """What part of everything is due to this tenant, which is in the engine."""
        return self._weight(tenant) / sum(self._weight(present) for present in self._num_present)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class WaitingQueue:
    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._queues: dict[str, list[Request]] = {}  # by tenant, sorted by queue key
        self._num_requests = 0
        self._num_forks = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for request in queue)

    @property
    def num_forks(self) -> int:
        """Those that count as a part of another request (n > 1), background ones apart."""
        return self._num_forks

    def push(self, request: Request) -> None:
        insort(self._queues.setdefault(request.message.tenant, []), request, key=_key)
        self._num_requests += 1
        self._num_forks += request.in_group and not request.background

    def remove(self, request: Request) -> None:
        tenant = request.message.tenant
        queue = self._queues[tenant]
        index = bisect_left(queue, request.queue_key, key=_key)
        assert queue[index] is request
        del queue[index]
        if not queue:
            del self._queues[tenant]
        self._num_requests -= 1
        self._num_forks -= request.in_group and not request.background

    def scan(self) -> Iterator[Request]:
        """Requests in order of service. The one just yielded may be removed before the next is asked for; nothing else may change."""
        position: dict[str, int] = {}
        while True:
            heads = [
                (queue[place].queue_key[0], self._shares.served(tenant), queue[place].queue_key[1:], tenant)
                for tenant, queue in self._queues.items()
                if (place := position.get(tenant, 0)) < len(queue)
            ]
            if not heads:
                return
            tenant = min(heads)[-1]
            place = position.get(tenant, 0)
            request = self._queues[tenant][place]
            yield request
            queue = self._queues.get(tenant, [])
            if place < len(queue) and queue[place] is request:
                position[tenant] = place + 1

    def check(self) -> None:
        assert self._num_requests == sum(len(queue) for queue in self._queues.values())
        assert self._num_forks == sum(request.in_group and not request.background for request in self)
        for tenant, queue in self._queues.items():
            assert queue, "an empty queue"
            assert queue == sorted(queue, key=_key)
            assert all(request.message.tenant == tenant for request in queue)


def _key(request: Request) -> tuple[int, float, int]:
    return request.queue_key
