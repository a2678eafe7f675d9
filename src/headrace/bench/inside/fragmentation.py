"""How much of the memory for keys and values is reserved and holds nothing: contiguous slots against blocks, by simulation.

A queue that never empties is served in steps: whoever fits is let in with its whole prompt, then every running answer grows by a token. Three ways to
give out the same memory:

- slots: a place of the longest request that is allowed, for each;
- regions: a place of the request's own prompt and limit, in one piece (first fit, nothing is ever moved);
- blocks: `core.kv_manager`, as Headrace serves with it, without a prefix cache; where no block is left for an answer to grow, the youngest request
  gives way and is begun again.

Answers end before their limit, as those of chats do. Figures are means over all steps in which requests still waited.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.core.kv_manager import BlockTable, KVManager

Lengths = Literal["mixed", "uniform"]
PROMPT, ANSWER, LIMIT = 128, 64, 256  # tokens: of a prompt and of an answer (medians), and what a client allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt: int  # tokens
    answer: int  # tokens until it ends
    limit: int  # tokens that the client allows, at least `answer`


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    request: Request
    place: Any  # the memory's own
    length: int  # tokens written


class Memory(Protocol):
    """Gives out places for `total` tokens."""

    total: int
    reserved: int  # tokens that nobody else can have

    def take(self, request: Request) -> Any | None:
        """A place for the prompt, and for what follows as far as this memory promises; None where there is none now."""

    def grow(self, place: Any, length: int) -> bool:
        """Room for so many tokens."""

    def free(self, place: Any) -> None: ...


class Slots:
    def __init__(self, total: int, *, longest: int) -> None:
        self.total, self.reserved, self._longest = total, 0, longest

    def take(self, request: Request) -> Any | None:
        if self.reserved + self._longest > self.total:
            return None
        self.reserved += self._longest
        return self._longest

    def grow(self, place: Any, length: int) -> bool:
        return length <= self._longest

    def free(self, place: Any) -> None:
        self.reserved -= self._longest


class Regions:
    def __init__(self, total: int) -> None:
        self.total, self.reserved = total, 0
        self._taken: list[tuple[int, int]] = []  # begin and end, ascending

    def take(self, request: Request) -> tuple[int, int] | None:
        size, begin = request.prompt + request.limit, 0
        for index, (first, last) in enumerate([*self._taken, (self.total, self.total)]):
            if first - begin >= size:
                region = (begin, begin + size)
                self._taken.insert(index, region)
                self.reserved += size
                return region
            begin = last
        return None

    def grow(self, place: tuple[int, int], length: int) -> bool:
        return length <= place[1] - place[0]

    def free(self, place: tuple[int, int]) -> None:
        self._taken.remove(place)
        self.reserved -= place[1] - place[0]


class Blocks:
    def __init__(self, total: int, *, block_size: int) -> None:
        self._kv = KVManager(num_blocks=total // block_size, block_size=block_size, enable_prefix_caching=False)
        self.total = total
        self._running = 0

    @property
    def reserved(self) -> int:
        return (self._kv.pool.num_blocks - self._kv.pool.num_free) * self._kv.block_size

    def take(self, request: Request) -> BlockTable | None:
        table = self._kv.new_table()
        # a block for each running answer stays free, so that who comes in does not drive out another at once
        if self._kv.take(table, range(request.prompt), read_cache=False, reserve=self._running) is None:
            return None
        self._running += 1
        return table

    def grow(self, place: BlockTable, length: int) -> bool:
        return self._kv.grow(place, length)

    def free(self, place: BlockTable) -> None:
        self._running -= 1
        self._kv.free(place)


@dataclass(slots=True, kw_only=True)
class _Totals:
    steps: int = 0
    reserved: int = 0  # tokens, summed over steps
    written: int = 0
    running: int = 0
    most_running: int = 0
    preemptions: int = 0
    finished: int = 0


def simulate(memory: Memory, requests: Sequence[Request]) -> dict[str, Any]:
    """Serves the requests in order. ValueError where one can never fit."""
    waiting, running, totals = deque(requests), list[Running](), _Totals()
    while waiting:
        while waiting and (place := memory.take(waiting[0])) is not None:
            request = waiting.popleft()
            running.append(Running(request=request, place=place, length=request.prompt))
        if not running:
            raise ValueError(f"a request of {waiting[0].prompt} tokens and a limit of {waiting[0].limit} never fits into {memory.total}")
        _grow(memory, running, waiting, totals)
        totals.steps += 1
        totals.reserved += memory.reserved
        totals.written += sum(one.length for one in running)
        totals.running += len(running)
        totals.most_running = max(totals.most_running, len(running))
        for one in [one for one in running if one.length == one.request.prompt + one.request.answer]:
            memory.free(one.place)
            running.remove(one)
            totals.finished += 1
    return {
        "unused_of_reserved": 1 - totals.written / totals.reserved,
        "unused_of_all": 1 - totals.written / (totals.steps * memory.total),
        "mean_running": totals.running / totals.steps,
        "most_running": totals.most_running,
        "finished_per_100_steps": 100 * totals.finished / totals.steps,
        "preemptions": totals.preemptions,
    }


def _grow(memory: Memory, running: list[Running], waiting: deque[Request], totals: _Totals) -> None:
    """A token for each running answer, the oldest first; the youngest gives way where there is no room."""
    for one in list(running):
        while one in running and not memory.grow(one.place, one.length + 1):
            if len(running) == 1:
                raise ValueError(f"a request of {one.request.prompt + one.request.answer} tokens never fits into {memory.total}")
            youngest = running.pop()
            memory.free(youngest.place)
            waiting.appendleft(youngest.request)
            totals.preemptions += 1
        if one in running:
            one.length += 1


def requests_of(lengths: Lengths, count: int, *, longest: int, seed: int = 0) -> list[Request]:
    """uniform: prompts of 128 tokens, answers of 64, which is also their limit. mixed: lognormal around these with a standard deviation of the
    logarithm of 0.8, from a quarter to four times as long, and a limit of 256 for all. None is longer than `longest` tokens with its limit."""
    if lengths == "uniform":
        return [Request(prompt=min(PROMPT, longest - ANSWER), answer=ANSWER, limit=ANSWER)] * count
    draw = random.Random(seed)

    def length(median: int) -> int:
        return round(median * min(4.0, max(0.25, draw.lognormvariate(0.0, 0.8))))

    drawn = [(length(PROMPT), length(ANSWER)) for _ in range(count)]
    return [Request(prompt=min(prompt, longest - LIMIT), answer=min(answer, LIMIT), limit=LIMIT) for prompt, answer in drawn]


def layouts(total: int, *, longest: int, block_sizes: Sequence[int]) -> Iterator[tuple[str, Callable[[], Memory]]]:
    """Names and makers of the memories."""
    yield f"slots of {longest}", lambda: Slots(total, longest=longest)
    yield "regions", lambda: Regions(total)
    for size in block_sizes:
        yield f"blocks of {size}", lambda size=size: Blocks(total, block_size=size)  # type: ignore[misc]


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'lengths':<10}{'memory':<16}{'unused of reserved':>20}{'unused of all':>15}{'running':>9}{'most':>6}{'ended/100 steps':>17}"]
    lines[0] += f"{'preempted':>11}"
    for found in results:
        shares = f"{found['unused_of_reserved']:>20.1%}{found['unused_of_all']:>15.1%}"
        counts = f"{found['mean_running']:>9.1f}{found['most_running']:>6}{found['finished_per_100_steps']:>17.1f}{found['preemptions']:>11}"
        lines.append(f"{found['lengths']:<10}{found['memory']:<16}{shares}{counts}")
    return "\n".join(lines)
