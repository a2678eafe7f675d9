"""A runner without a model: it keeps what each KV position holds and checks, for each row, all positions that the row attends to.

The "keys and values" of a position are a hash of all tokens up to it, so a wrong block, a missed copy or swap, or a token computed after
another history is seen at once. The next token is a pure function of the history: whatever the schedule, `naive_answer` gives the answer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

from headrace.config import SchedulerConfig
from headrace.core.messages import AbortRequest, AddRequest, Row, SampledRow, SlotStart, StepPlan, StepResult, TokenLogprobs, TokenOutput
from headrace.core.scheduler import Scheduler
from headrace.core.step_work import StepWork
from headrace.sampling_params import SamplingParams

VOCAB = 50
GARBAGE = b"garbage"


def config(**fields: object) -> SchedulerConfig:
    base: dict[str, object] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 256}
    return SchedulerConfig(**(base | fields))  # type: ignore[arg-type]


def extend(history: bytes, token: int) -> bytes:
    """The hash of a history with one more token, and that token."""
    last = token.to_bytes(8, "little")
    return hashlib.blake2b(history + last, digest_size=8).digest() + last


def hashes(token_ids: list[int] | tuple[int, ...]) -> list[bytes]:
    """The hash of the history up to and with each position."""
    return list(accumulate(token_ids, extend, initial=b""))[1:]


def token_after(history: bytes) -> int:
    """Most tokens are foreseeable, as in an answer that repeats itself."""
    if history[0] % 4 < 3:
        return 5 + (int.from_bytes(history[8:], "little") + 1) % 6
    return history[1] % VOCAB


def next_token(token_ids: list[int] | tuple[int, ...]) -> int:
    return token_after(hashes(token_ids)[-1])


def naive_answer(message: AddRequest, max_model_len: int = 10**9) -> tuple[tuple[int, ...], str]:
    """(token ids, finish reason) of a request, computed alone and simply."""
    prompt = message.prompt_token_ids
    history, answer = hashes(prompt)[-1], []
    limit = min(message.params.max_tokens if message.params.max_tokens is not None else 10**9, max_model_len - len(prompt))
    while len(answer) < limit:
        token = token_after(history)
        history = extend(history, token)
        answer.append(token)
        ends = token in message.eos_token_ids or token in message.params.stop_token_ids
        if ends and len(answer) >= message.params.min_tokens:
            return tuple(answer), "stop"
    return tuple(answer), "length"


def request(
    request_id: str, prompt: list[int] | tuple[int, ...] | int, max_tokens: int | None = 8, arrival: float = 0.0, **fields: object
) -> AddRequest:
    """A request; `prompt` as a number makes one of so many tokens that no other has."""
    if isinstance(prompt, int):
        prompt = [hashes([i, *request_id.encode()])[-1][0] % VOCAB for i in range(prompt)]
    names = set(SamplingParams.__dataclass_fields__)
    params = {name: value for name, value in fields.items() if name in names}
    others = {name: value for name, value in fields.items() if name not in names}
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        arrival=arrival,
        **others,  # type: ignore[arg-type]
    )


def work_of(rows: tuple[Row, ...]) -> StepWork:
    found = StepWork()
    for row in rows:
        attended = row.num_tokens * (row.start + row.num_tokens)
        if row.sample and row.num_tokens == 1 + row.num_speculated:
            more = StepWork(row.num_tokens, attended, 0, 0, 1)
        else:
            more = StepWork(0, 0, row.num_tokens, attended, row.sample)
        found = StepWork(*map(add, found, more))
    return found


@dataclass
class Slot:
    request_id: str
    token_ids: list[int]
    num_prompt: int
    block_table: list[int] = field(default_factory=list)
    histories: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histories.extend(hashes(self.token_ids))

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self.histories.append(extend(self.histories[-1], token))

    def drop(self, count: int) -> None:
        """Forget the last tokens: they were guesses."""
        if count:
            del self.token_ids[-count:], self.histories[-count:]


class BlockWorld:
    """Runs plans in order. Everything it is told is checked against what it holds."""

    def __init__(self, scheduler_config: SchedulerConfig) -> None:
        self.block_size = scheduler_config.block_size
        self.max_tokens = scheduler_config.max_num_batched_tokens
        self.device: list[list[bytes | None]] = [[None] * self.block_size for _ in range(scheduler_config.num_blocks)]
        self.host: list[list[bytes | None]] = [[None] * self.block_size for _ in range(scheduler_config.num_host_blocks)]
        self.slots: dict[int, Slot] = {}
        self.computed: dict[str, int] = {}  # request id -> positions computed in all, repeated ones too
        self.lost: set[str] = set()  # requests that ended with a step that failed: what they still write is garbage

    def execute(self, plan: StepPlan, *, failing: frozenset[str] = frozenset(), seconds: float = 0.01) -> StepResult:
        assert plan.rows
        assert plan.num_tokens <= self.max_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        decodes = [row.num_tokens == 1 and row.sample for row in plan.rows]
        assert decodes == sorted(decodes, reverse=True), "decode rows come first"
        assert plan.work == work_of(plan.rows)
        for source, to in plan.swap_out:
            self.host[to] = self.device[source].copy()
        for source, to in plan.swap_in:
            self.device[to] = self.host[source].copy()
        copied = [self.device[source].copy() for source, _ in plan.copies]
        for (_, to), content in zip(plan.copies, copied, strict=True):
            self.device[to] = content
        for start in plan.starts:
            self._start(start, plan)
        for row in plan.rows:
            self._write(row)
        return StepResult(step_id=plan.step_id, rows=tuple(self._attend(row, row.request_id in failing) for row in plan.rows), seconds=seconds)

    def wreck(self, plan: StepPlan) -> None:
        """The step raises half way: all that it should have written is garbage."""
        for _, to in plan.swap_out:
            self.host[to] = [GARBAGE] * self.block_size
        for _, to in (*plan.swap_in, *plan.copies):
            self.device[to] = [GARBAGE] * self.block_size
        for start in plan.starts:
            self._start(start, plan)
        self.lost.update(row.request_id for row in plan.rows)
        for row in plan.rows:
            self._write(row)

    def _start(self, start: SlotStart, plan: StepPlan) -> None:
        (row,) = [row for row in plan.rows if row.request_id == start.request_id]
        assert row.slot == start.slot
        assert row.block_offset == 0
        self.slots[start.slot] = Slot(start.request_id, list(start.token_ids), start.num_prompt_tokens)

    def _write(self, row: Row) -> None:
        slot = self.slots[row.slot]
        assert slot.request_id == row.request_id
        assert row.block_offset == len(slot.block_table)
        slot.block_table.extend(row.new_block_ids)
        end = row.start + row.num_tokens
        if row.request_id in self.lost:
            for position in range(row.start, end):
                self.device[slot.block_table[position // self.block_size]][position % self.block_size] = GARBAGE
            return
        if row.num_speculated:
            assert row.sample
            assert end - row.num_speculated == len(slot.token_ids)
            for token in row.token_ids[-row.num_speculated :]:
                slot.append(token)
        assert end <= len(slot.token_ids), "a token that is not sampled yet"
        assert row.token_ids in ((), tuple(slot.token_ids[row.start : end]))
        assert row.token_ids or (row.num_tokens == 1 and end == len(slot.token_ids))
        assert not row.sample or end == len(slot.token_ids)
        self.computed[row.request_id] = self.computed.get(row.request_id, 0) + row.num_tokens
        for position in range(row.start, end):
            block, offset = slot.block_table[position // self.block_size], position % self.block_size
            self.device[block][offset] = slot.histories[position]

    def _attend(self, row: Row, failing: bool) -> SampledRow:
        slot = self.slots[row.slot]
        end = row.start + row.num_tokens
        guesses = row.token_ids[len(row.token_ids) - row.num_speculated :]
        if row.request_id in self.lost:
            return SampledRow(request_id=row.request_id, token_ids=(0,) if row.sample else ())
        for position in range(end):
            block, offset = slot.block_table[position // self.block_size], position % self.block_size
            assert self.device[block][offset] == slot.histories[position], f"{row.request_id}: position {position} is wrong"
        slot.drop(row.num_speculated)
        if failing:
            if row.sample:
                slot.append(0)  # a plan made ahead may still compute whatever was drawn
            return SampledRow(request_id=row.request_id, error="the logits are not finite")
        scores = tuple(score(slot.token_ids, position) for position in range(row.start + 1, min(end, slot.num_prompt - 1) + 1))
        token_ids: list[int] = []
        for guess in (*guesses, None) if row.sample else ():
            token_ids.append(token_after(slot.histories[-1]))
            slot.append(token_ids[-1])
            if token_ids[-1] != guess:
                break
        return SampledRow(request_id=row.request_id, token_ids=tuple(token_ids), prompt_logprobs=scores or None)


def score(token_ids: list[int] | tuple[int, ...], position: int) -> TokenLogprobs:
    """The made-up log probability of the token at a position."""
    return TokenLogprobs(token_id=token_ids[position], logprob=-float(hashes(token_ids[: position + 1])[-1][1]), rank=position)


class Engine:
    """A scheduler over a block world, turned by hand. Collects outputs and checks that each request ends once."""

    def __init__(self, scheduler_config: SchedulerConfig, **fields: object) -> None:
        self.config = scheduler_config
        self.scheduler = Scheduler(scheduler_config, **fields)  # type: ignore[arg-type]
        self.world = BlockWorld(scheduler_config)
        self.now = 0.0
        self.plans: list[StepPlan] = []  # every plan made
        self.outstanding: list[StepPlan] = []
        self.messages: dict[str, AddRequest] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.first_token_step: dict[str, int] = {}
        self.cut: set[str] = set()  # aborted by the client

    def add(self, message: AddRequest) -> TokenOutput | None:
        assert message.request_id not in self.messages
        self.messages[message.request_id] = message
        self.outputs[message.request_id] = []
        refused = self.scheduler.add(message, self.now)
        if refused is not None:
            self.take([refused])
        return refused

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            seen = self.outputs[output.request_id]
            assert not seen or seen[-1].finish_reason is None, "an output after the end"
            seen.append(output)
            assert (output.cached_tokens is None) or len(seen) == 1

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        self.take(self.scheduler.take_outputs())
        if plan is not None:
            self.plans.append(plan)
            self.outstanding.append(plan)
        self.scheduler.check()
        return plan

    def update(self, seconds: float = 0.01, failing: frozenset[str] = frozenset()) -> None:
        plan = self.outstanding.pop(0)
        result = self.world.execute(plan, failing=failing, seconds=seconds)
        self.now += seconds
        outputs = self.scheduler.update(result, self.now)
        for output in outputs:
            if output.token_ids:
                self.first_token_step.setdefault(output.request_id, plan.step_id)
        self.take(outputs)
        self.scheduler.check()

    def fail_step(self) -> None:
        """The oldest plan's step raises."""
        plan = self.outstanding.pop(0)
        outputs = self.scheduler.fail_step(plan, "the step failed")
        self.world.wreck(plan)
        self.world.lost.update(output.request_id for output in outputs if output.error_code == "request_failed")
        self.take(outputs)
        self.scheduler.check()

    def abort(self, request_id: str, reason: str = "abort") -> TokenOutput | None:
        output = self.scheduler.abort(AbortRequest(request_id=request_id, reason=reason))  # type: ignore[arg-type]
        if output is not None:
            self.take([output])
            self.cut.add(request_id)
        self.scheduler.check()
        return output

    def turn(self, *, ahead: bool = True) -> bool:
        """One turn of the wheel: plan (ahead), then take one result in. False when nothing is left to do."""
        for _ in range(2 if ahead else 1):
            if len(self.outstanding) < (2 if ahead else 1):
                self.plan()
        if self.outstanding:
            self.update()
            return True
        return False

    def run(self, *, ahead: bool = True, max_steps: int = 20_000) -> None:
        """Turn until all requests have ended."""
        for _ in range(max_steps):
            if not self.turn(ahead=ahead):
                break
        assert not self.scheduler.has_work(), "requests are stuck"

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(token for output in self.outputs[request_id] for token in output.token_ids)

    def end(self, request_id: str) -> TokenOutput:
        last = self.outputs[request_id][-1]
        assert last.finish_reason is not None
        return last

    def check_answers(self) -> None:
        """Every request that was not refused, cancelled or failed has exactly its naive answer; the others a beginning of it."""
        for request_id, message in self.messages.items():
            answer, reason = naive_answer(message, self.config.max_model_len)
            end = self.end(request_id)
            if end.finish_reason in ("stop", "length") and request_id not in self.cut:
                assert (self.tokens(request_id), end.finish_reason) == (answer, reason), request_id
            else:
                assert self.tokens(request_id) == answer[: len(self.tokens(request_id))]

    def check_at_rest(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
