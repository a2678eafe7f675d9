"""Block tables: which blocks hold the keys and values of a request, where they come from and where they go.

The rules that keep blocks right while plans are made ahead:

- A block is written only by a request that alone holds it, at positions that nobody can find. So whoever starts on shared blocks gets a
  copy of the block it will write first (copy on write): a fork, and a prompt that is found whole (its last token is computed again).
- Copies run before the rows of their plan. A block that a row of the same plan fills is never copied (`written`).
- A block to be copied from stays held until the plan is made (`_pinned`), so nothing in the same plan can overwrite it first.
- Swap-outs run before swap-ins. A host block that this plan reads from is free for others from the next plan on (`_host_leaving`).
- A full block becomes findable as soon as a plan that fills it is made: plans run in order, and within a plan all rows write a layer
  before any row attends to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.core.block_pool import BlockPool
from headrace.core.prefix import HashFunction, PrefixNode, blake2b_digest, make_node, same_prefix
from headrace.core.prefix_journal import PrefixJournal
from headrace.core.sessions import Session, Sessions

SESSION_SHARE = 4  # one session leases at most one block in so many of the pool; all sessions together one in two, see `BlockPool`

BlockPairs = list[tuple[int, int]]


@dataclass(slots=True, kw_only=True, eq=False)
class BlockTable:
    """The blocks of one request. Made by `KVManager.new_table`; only the manager changes it."""

    salt: str | None
    tenant: str = ""  # whose request it is: for the journal alone, blocks are shared between tenants
    session_id: str | None = None  # set: the blocks stay under a lease after the end
    background: bool = False  # whose request may pause for long: only its like wait for what it computes
    blocks: list[int] = field(default_factory=list)  # device block of positions i * block_size ..
    host_blocks: list[int] = field(default_factory=list)  # while swapped out; `blocks` is empty then
    chain: list[PrefixNode] = field(default_factory=list)  # nodes of the first full blocks of known tokens, made when needed
    num_registered: int = 0  # the first so many blocks are findable (these ones or equal ones)
    num_promised: int = 0  # blocks below this index and from num_registered on will be computed by this request


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A prefix that another request is computing right now."""

    holder: BlockTable
    digest: bytes  # of the first block that is missing
    num_tokens: int  # tokens from the start that both share


class KVManager:
    """Block tables of all requests over one `BlockPool` and a number of host blocks for swapping."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        session_lease_s: float = 0.0,
        hash_function: HashFunction = blake2b_digest,
    ) -> None:
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.pool = BlockPool(num_blocks)
        self.journal = PrefixJournal(num_blocks + self.pool.max_evicted)  # what is cached, and what was
        self.sessions = Sessions(num_blocks)
        self.written: set[int] = set()  # blocks that rows of the plan being made write
        self.caching = enable_prefix_caching
        self._session_lease_s = session_lease_s
        self._hash_function = hash_function
        self._now = 0.0
        self._pinned: list[int] = []
        self._host_free = list(range(num_host_blocks - 1, -1, -1))
        self._host_leaving: list[int] = []
        self._promises: dict[bytes, tuple[BlockTable, PrefixNode]] = {}

    # -- one plan ------------------------------------------------------------------------------------------------------

    def begin_plan(self, now: float) -> None:
        self._now = now
        self.pool.expire_leases(now)
        self._host_free.extend(self._host_leaving)
        self._host_leaving.clear()
        self.written.clear()

    def end_plan(self) -> None:
        for block in self._pinned:
            self.pool.release(block)
        self._pinned.clear()

    def mark_written(self, table: BlockTable, start: int, num_tokens: int) -> list[int]:
        """A row of the plan being made writes positions start .. start + num_tokens - 1; the blocks of these."""
        first, last = start // self.block_size, (start + num_tokens - 1) // self.block_size
        blocks = table.blocks[first : last + 1]
        self.pool.check_written(blocks)
        self.written.update(blocks)
        return blocks

    # -- taking blocks -------------------------------------------------------------------------------------------------

    def new_table(self, *, salt: str | None = None, tenant: str = "", session_id: str | None = None, background: bool = False) -> BlockTable:
        return BlockTable(salt=salt, tenant=tenant, session_id=session_id, background=background)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """The findable blocks that hold the longest prefix of `token_ids`. Nothing is held by this."""
        blocks: list[int] = []
        if not self.caching:
            return blocks
        for i in range(len(token_ids) // self.block_size):
            node = self.chain_node(table, token_ids, i)
            block = self.pool.find(node)
            if block is None:
                break
            canonical = self.pool.node(block)
            assert canonical is not None
            if canonical is not node:
                table.chain[i:] = [canonical]  # later nodes name the old parent; they are made again
            blocks.append(block)
        return blocks

    def in_flight(self, table: BlockTable, token_ids: Sequence[int], num_matched: int) -> InFlight | None:
        """Whether the first block after the `num_matched` found ones is being computed by another request, and how much more is."""
        promise = self._promise_for(table, token_ids, num_matched)
        if promise is None or not same_prefix(promise[1], table.chain[num_matched]):
            return None
        holder = promise[0]
        if holder.background and not table.background:
            return None
        end = num_matched + 1
        while (more := self._promise_for(table, token_ids, end)) is not None and more[0] is holder:
            if more[1].token_ids != table.chain[end].token_ids:
                break
            end += 1
        return InFlight(holder=holder, digest=table.chain[num_matched].digest, num_tokens=end * self.block_size)

    def still_in_flight(self, found: InFlight) -> bool:
        promise = self._promises.get(found.digest)
        return promise is not None and promise[0] is found.holder

    def take(self, table: BlockTable, token_ids: Sequence[int], *, read_cache: bool, reserve: int) -> tuple[int, BlockPairs] | None:
        """Take blocks for all of `token_ids`, shared ones where the cache has them.

        Returns the number of tokens that need no computing (at least the last one is always computed) and the block copies to make;
        None where fewer than `reserve` blocks would stay free.
        """
        assert not table.blocks
        matched = self.match(table, token_ids) if read_cache else []
        num_tokens = len(token_ids)
        source: int | None = None
        if matched and len(matched) * self.block_size == num_tokens:
            source = matched.pop()
            if source in self.written or not self._room(matched, source, num_tokens, reserve):
                source = None  # compute the last block instead of copying it
        if not self._room(matched, source, num_tokens, reserve):
            return None
        for block, node in zip(matched, table.chain, strict=False):
            self.pool.acquire(block)
            self.journal.note(table.tenant, node)
        if source is not None:
            self._pin(source)
        table.blocks = [*matched, *(self.pool.allocate() for _ in range(self.num_blocks_for(num_tokens) - len(matched)))]
        table.num_registered = len(matched)
        self._promise(table, token_ids)
        if source is None:
            return len(matched) * self.block_size, []
        return num_tokens - 1, [(source, table.blocks[-1])]

    def _room(self, matched: list[int], source: int | None, num_tokens: int, reserve: int) -> bool:
        shared = matched if source is None else [*matched, source]
        num_idle = sum(self.pool.ref_count(block) == 0 for block in shared)
        return self.pool.num_free - num_idle >= self.num_blocks_for(num_tokens) - len(matched) + reserve

    def restore(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """Take blocks for full blocks of tokens that were computed elsewhere, as many as there are without evicting any.

        Returns those that the caller must fill, the last ones of the table; it then calls `register` and `free`, or only `free` where it cannot.
        """
        assert not table.blocks
        matched = self.match(table, token_ids)
        for block, node in zip(matched, table.chain, strict=False):
            self.pool.acquire(block)
            self.journal.note(table.tenant, node)
        num_new = min(len(token_ids) // self.block_size - len(matched), self.pool.num_blank) if self.caching else 0
        new = [self.pool.allocate() for _ in range(num_new)]
        table.blocks = [*matched, *new]
        table.num_registered = len(matched)
        return new

    def fork(self, parent: BlockTable, child: BlockTable, num_prompt: int, *, reserve: int) -> tuple[int, BlockPairs] | None:
        """Share the parent's prompt blocks; the child computes the last prompt token again, in a block of its own.

        Returns as `take` does. The caller has checked that earlier plans fill the parent's prompt blocks, so that they can be copied.
        """
        assert not child.blocks
        last, offset = divmod(num_prompt - 1, self.block_size)
        source = parent.blocks[last]
        if self.pool.num_free < 1 + reserve:
            return None
        shared = parent.blocks[:last]
        for block in shared:
            self.pool.acquire(block)
        child.blocks = [*shared, self.pool.allocate()]
        child.chain = parent.chain[:last]
        child.num_registered = min(last, parent.num_registered)
        if not offset:
            return num_prompt - 1, []
        self._pin(source)
        return num_prompt - 1, [(source, child.blocks[-1])]

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give the table a place for position num_tokens - 1. False where no block is free."""
        held = len(table.blocks)
        if num_tokens <= held * self.block_size:
            return True
        need = self.num_blocks_for(num_tokens) - held
        if need > self.pool.num_free:
            return False
        table.blocks.extend(self.pool.allocate() for _ in range(need))
        return True

    def register(self, table: BlockTable, token_ids: Sequence[int], num_written: int) -> None:
        """Make full blocks findable: those among the first `num_written` positions, planned ones included, whose tokens are known."""
        if not self.caching:
            return
        num_full = min(num_written, len(token_ids)) // self.block_size
        if num_full <= table.num_registered:
            return
        for i in range(table.num_registered, num_full):
            node = self.chain_node(table, token_ids, i)
            if self.pool.find(node) is None:
                self.pool.register(table.blocks[i], node)
            self.journal.note(table.tenant, node)
            self._break_promise(table, node)
        table.num_registered = num_full

    # -- giving blocks back --------------------------------------------------------------------------------------------

    def free(self, table: BlockTable, *, lease_s: float | None = None) -> None:
        """Give all blocks back. Later blocks are evicted before earlier ones. `lease_s`: of a session, instead of a whole lease."""
        self._release_device(table, lease_s)
        self._host_free.extend(table.host_blocks)
        table.host_blocks.clear()

    def num_freed_by(self, tables: Iterable[BlockTable]) -> int:
        """Blocks that nobody would hold if all these tables gave theirs back."""
        counts = Counter(block for table in tables for block in table.blocks)
        return sum(self.pool.ref_count(block) == count for block, count in counts.items())

    def can_swap_out(self, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) <= len(self._host_free)

    def swap_out(self, table: BlockTable, num_tokens: int) -> BlockPairs:
        """Move the first `num_tokens` positions to host blocks; (device, host) pairs. The caller has checked `can_swap_out`."""
        blocks = table.blocks[: self.num_blocks_for(num_tokens)]
        host_blocks = [self._host_free.pop() for _ in blocks]
        self._release_device(table)
        table.host_blocks = host_blocks
        return list(zip(blocks, host_blocks, strict=True))

    def swap_in(self, table: BlockTable, token_ids: Sequence[int], *, reserve: int) -> BlockPairs | None:
        """Take device blocks for all of `token_ids` and fill the first ones from the host; (host, device) pairs, or None without room."""
        assert table.host_blocks
        assert not table.blocks
        need = self.num_blocks_for(len(token_ids))
        if self.pool.num_free < need + reserve:
            return None
        table.blocks = [self.pool.allocate() for _ in range(need)]
        pairs = list(zip(table.host_blocks, table.blocks, strict=False))
        self._host_leaving.extend(table.host_blocks)
        table.host_blocks = []
        self._promise(table, token_ids)
        return pairs

    def uncache(self, blocks: Iterable[int]) -> None:
        """Nobody may find these blocks any more: what they hold is wrong."""
        for block in blocks:
            self.pool.uncache(block)

    def _release_device(self, table: BlockTable, lease_s: float | None = None) -> None:
        for node in table.chain[table.num_registered : table.num_promised]:
            self._break_promise(table, node)
        lease_until, num_leased = 0.0, 0
        if table.session_id is not None:
            lease_until = self._now + (self._session_lease_s if lease_s is None else min(lease_s, self._session_lease_s))
            num_leased = max(1, self.pool.num_blocks // SESSION_SHARE)
            self._note_session(table, table.session_id, lease_until)
        for index in reversed(range(len(table.blocks))):
            self.pool.release(table.blocks[index], lease_until=lease_until if index < num_leased else 0.0)
        table.blocks = []
        table.num_registered = 0
        table.num_promised = 0

    def _note_session(self, table: BlockTable, session_id: str, lease_until: float) -> None:
        chain = tuple(table.chain[: table.num_registered])
        if chain:
            self.sessions.note(Session(session_id=session_id, tenant=table.tenant, salt=table.salt, lease_until=lease_until, chain=chain))

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _pin(self, block: int) -> None:
        self.pool.acquire(block)
        self._pinned.append(block)

    def chain_node(self, table: BlockTable, token_ids: Sequence[int], index: int) -> PrefixNode:
        """What block `index` of the table can be found by; made where the table does not have it yet."""
        while len(table.chain) <= index:
            start = len(table.chain) * self.block_size
            parent = table.chain[-1] if table.chain else None
            table.chain.append(make_node(parent, table.salt, tuple(token_ids[start : start + self.block_size]), self._hash_function))
        return table.chain[index]

    def _promise(self, table: BlockTable, token_ids: Sequence[int]) -> None:
        if not self.caching:
            return
        table.num_promised = len(token_ids) // self.block_size
        for i in range(table.num_registered, table.num_promised):
            node = self.chain_node(table, token_ids, i)
            self._promises.setdefault(node.digest, (table, node))

    def _break_promise(self, table: BlockTable, node: PrefixNode) -> None:
        promise = self._promises.get(node.digest)
        if promise is not None and promise[0] is table:
            del self._promises[node.digest]

    def _promise_for(self, table: BlockTable, token_ids: Sequence[int], index: int) -> tuple[BlockTable, PrefixNode] | None:
        if (index + 1) * self.block_size > len(token_ids):
            return None
        return self._promises.get(self.chain_node(table, token_ids, index).digest)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Recompute every derived fact from the tables of all live requests; raise AssertionError where one is wrong."""
        tables = list(tables)
        self.pool.check()
        self.sessions.check()
        counts = Counter(block for table in tables for block in table.blocks)
        counts.update(self._pinned)
        for block in range(self.pool.num_blocks):
            assert self.pool.ref_count(block) == counts[block], f"block {block} is held {self.pool.ref_count(block)} times, not {counts[block]}"
        host = [*self._host_free, *self._host_leaving, *(block for table in tables for block in table.host_blocks)]
        assert sorted(host) == list(range(self.num_host_blocks)), "a host block is lost or in two places"
        for table in tables:
            assert not (table.blocks and table.host_blocks)
            assert table.num_registered <= len(table.blocks)
            assert len(set(table.blocks)) == len(table.blocks)
            for node, parent in zip(table.chain[1:], table.chain, strict=False):
                assert same_prefix(node.parent, parent)
        promised = {(id(table), id(node)) for table in tables for node in table.chain[table.num_registered : table.num_promised]}
        for digest, (table, node) in self._promises.items():
            assert (id(table), id(node)) in promised, "a promise that nobody keeps"
            assert node.digest == digest
