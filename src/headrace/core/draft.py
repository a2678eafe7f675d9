"""A plan in the making, and what the scheduler remembers of it until its result is in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.core.kv_manager import BlockPairs
from headrace.core.messages import Row, SlotStart, StepPlan
from headrace.core.request import Request
from headrace.core.step_work import StepWork


@dataclass(slots=True, kw_only=True)
class DraftRow:
    start: int
    num_tokens: int = 0
    sample: bool = False
    written: list[int] = field(default_factory=list)  # device blocks that hold its positions; one may be named twice
    guesses: tuple[int, ...] = ()  # tokens behind the last known one, computed with it

    @property
    def is_decode(self) -> bool:
        """Whether its one token, with the guesses behind it, yields the next."""
        return self.sample and self.num_tokens == 1


@dataclass(slots=True, kw_only=True)
class PlanDraft:
    step_id: int
    rows: dict[Request, DraftRow] = field(default_factory=dict)
    swap_out: BlockPairs = field(default_factory=list)  # (device, host)
    swap_in: BlockPairs = field(default_factory=list)  # (host, device)
    copies: BlockPairs = field(default_factory=list)  # (from, to)
    num_tokens: int = 0  # without guesses
    num_decode_tokens: int = 0  # of rows that were decoding when the plan began
    decode_tokens: int = 0  # these five as in `StepWork`
    decode_attended: int = 0
    prompt_tokens: int = 0
    prompt_attended: int = 0
    sampled: int = 0
    num_repeated: int = 0  # tokens computed before and lost by preemption
    has_preempted: bool = False

    def schedule(self, request: Request, num_tokens: int, written: Iterable[int]) -> None:
        """Compute `num_tokens` more positions of a running request, which are in the blocks `written`.

        A second call in the same draft extends the row.
        """
        begin, before = request.num_computed, request.num_computed_before
        end, known = begin + num_tokens, len(request.token_ids) + request.num_pending
        assert num_tokens >= 1
        assert end <= known
        assert end <= request.num_positions
        row = self.rows.get(request)
        if row is None:
            row = self.rows[request] = DraftRow(start=begin)
        else:
            self._count(row, -1)
        assert not row.sample
        if begin < before:
            self.num_repeated += min(end, before) - begin
        request.num_computed = end
        if end > before:
            request.num_computed_before = end
        row.num_tokens += num_tokens
        request.planned_step = self.step_id
        row.written += written
        self.num_tokens += num_tokens
        if end == known and request.samples:
            row.sample = True
            request.num_pending += 1
        self._count(row, 1)

    def speculate(self, request: Request, guesses: tuple[int, ...], written: Iterable[int]) -> None:
        """Compute `guesses` behind the one known token of the request's row, at positions in the blocks `written`.

        The request's counters do not know of them: they move on when the result says how many were right.
        """
        row = self.rows[request]
        assert row.sample
        assert row.num_tokens == 1
        assert row.start == len(request.token_ids) - 1
        self._count(row, -1)
        row.guesses = guesses
        self._count(row, 1)
        row.written += written

    def _count(self, row: DraftRow, times: int) -> None:
        num_tokens = row.num_tokens + len(row.guesses)
        attended = num_tokens * (row.start + num_tokens)
        self.sampled += times * row.sample
        if row.is_decode:
            self.decode_tokens += times * num_tokens
            self.decode_attended += times * attended
        else:
            self.prompt_tokens += times * num_tokens
            self.prompt_attended += times * attended

    @property
    def work(self) -> StepWork:
        return StepWork(self.decode_tokens, self.decode_attended, self.prompt_tokens, self.prompt_attended, self.sampled)

    def build(self) -> PlannedStep:
        """The frozen plan; from now on the runner knows the slots and blocks in it."""
        decodes: list[tuple[Request, DraftRow]] = []  # first, as the runner wants them
        others: list[tuple[Request, DraftRow]] = []
        for item in self.rows.items():
            (decodes if item[1].is_decode and not item[1].guesses else others).append(item)
        ordered = decodes + others
        plan = StepPlan(
            step_id=self.step_id,
            starts=tuple(_take_start(request) for request in self.rows if request.needs_start),
            rows=tuple([_take_row(request, row) for request, row in ordered]),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
            work=self.work,
        )
        return PlannedStep(
            plan=plan,
            requests=tuple([request for request, _ in ordered]),
            written=tuple([tuple(row.written) for _, row in ordered]),
            speculates=any(row.guesses for _, row in others),
            num_repeated=self.num_repeated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    plan: StepPlan
    requests: tuple[Request, ...]  # of the plan's rows; by now some may be finished or preempted
    written: tuple[tuple[int, ...], ...]  # device blocks that each row writes
    speculates: bool = False  # how many tokens it gives is not known before its result
    num_repeated: int = 0  # tokens computed before and lost by preemption

    def spread(self, device: set[int], host: set[int]) -> None:
        """Add the blocks that this plan fills from blocks in the two sets."""
        host.update(to for source, to in self.plan.swap_out if source in device)
        device.update(to for source, to in self.plan.swap_in if source in host)
        device.update(to for source, to in self.plan.copies if source in device)


def _take_start(request: Request) -> SlotStart:
    request.needs_start = False
    return SlotStart(
        request_id=request.request_id,
        slot=request.slot,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt,
        params=request.message.params,
        eos_token_ids=request.message.eos_token_ids,
        pooling=request.message.pooling,
    )


def _take_row(request: Request, row: DraftRow) -> Row:
    end, known = row.start + row.num_tokens, len(request.token_ids)
    unknown = end > known
    assert not unknown or (row.num_tokens == 1 and row.start == known)
    offset, blocks = request.num_sent_blocks, request.table.blocks
    request.num_sent_blocks = len(blocks)
    return Row(
        request_id=request.request_id,
        slot=request.slot,
        start=row.start,
        num_tokens=row.num_tokens + len(row.guesses),
        token_ids=() if unknown else (*request.token_ids[row.start : end], *row.guesses),
        block_offset=offset,
        new_block_ids=tuple(blocks[offset:]) if offset < len(blocks) else (),
        sample=row.sample,
        num_speculated=len(row.guesses),
    )
