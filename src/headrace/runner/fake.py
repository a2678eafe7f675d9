"""A runner without a model, for tests of everything above it. It imports no torch.

Each token it gives is a pure function of all tokens before it, so any error in the bookkeeping of tokens changes the answer. In place of
keys and values its blocks hold, for each position, a hash of all tokens up to there. Before a row attends, every position of its context is
compared with what must stand there: a block that was freed too early, copied or swapped wrongly, or shared with another prefix is found
in the step that would have read it.

`EngineConfig.model` scripts it: "fake", or a JSON object with the fields of `FakeScript`.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path

from headrace.config import CompileStatus, EngineConfig, EngineInfo
from headrace.core.messages import Kernel, Row, SampledRow, SlotStart, StepPlan, StepResult, TokenLogprobs
from headrace.errors import ConfigError, StartError
from headrace.runner.interface import LOST_SLOT, NON_FINITE

EMBEDDING_SIZE = 8
HELD_PAUSE_S = 0.005  # between two looks at the file that holds it
_MASK = (1 << 64) - 1


class KVMismatch(RuntimeError):
    """A row attends a position that holds something else than the tokens of its own history."""


class PlanError(RuntimeError):
    """A plan breaks the contract of `StepPlan`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """How a fake runner behaves. Steps are counted from 1 by calls of `execute`."""

    vocab_size: int = 259
    max_model_len: int = 512  # where the config has none
    num_blocks: int = 256  # where the config has no num_gpu_blocks_override
    num_host_blocks: int = 64  # where the config has swap_space; else there are none
    eos_token_ids: tuple[int, ...] = (257,)
    eos_every: int = 40  # one token in so many is an end token; 0: none ever
    low: int = 0  # other tokens are from low ..
    high: int | None = None  # .. to high - 1; None: vocab_size
    echo: int = 0  # most tokens are the one so many places before, as in an answer that quotes; 0: none is
    step_seconds: float = 0.0  # each step takes so long
    token_seconds: float = 0.0  # and so much more for each of its tokens
    start_seconds: float = 0.0
    held_by: str | None = None  # path: the start and each step wait while this file exists
    fail_start: str | None = None  # the start fails with this message
    raise_at_step: tuple[int, ...] = ()
    hang_at_step: int | None = None
    exit_at_step: int | None = None  # the process ends without a word
    once: str | None = None  # path: raise, hang and exit happen only while this file is absent, and make it
    nan_token: int | None = None  # a request with this token in its history has non-finite logits

    @classmethod
    def parse(cls, model: str) -> FakeScript:
        """The script of `EngineConfig.model`. Raises `ConfigError` for an unknown field."""
        if not model.lstrip().startswith("{"):
            return cls()
        values = json.loads(model)
        unknown = set(values) - {entry.name for entry in fields(cls)}
        if unknown:
            raise ConfigError(f"A fake runner has no setting {', '.join(sorted(unknown))}.")
        if isinstance(values.get("raise_at_step"), int):
            values["raise_at_step"] = (values["raise_at_step"],)
        for name in ("raise_at_step", "eos_token_ids"):
            if name in values:
                values[name] = tuple(values[name])
        return cls(**values)


@dataclass(slots=True, kw_only=True)
class _Slot:
    start: SlotStart
    tokens: list[int]
    hashes: list[int]  # [i]: hash of tokens[: i + 1]
    table: list[int] = field(default_factory=list)
    num_pooled: int = 0  # positions whose vectors are in `sums`
    sums: list[float] = field(default_factory=lambda: [0.0] * EMBEDDING_SIZE)

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.hashes.append(_extend(self.hashes[-1], token))

    def drop(self, count: int) -> None:
        """Forget the last tokens: they were guesses."""
        if count:
            del self.tokens[-count:], self.hashes[-count:]


def _extend(prefix_hash: int, token: int) -> int:
    return ((prefix_hash ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def vector_of(prefix_hash: int) -> list[float]:
    """Numbers in [-1, 1) that stand for the hidden state of a position."""
    return [(_mix(prefix_hash + index) >> 11) / (1 << 52) - 1 for index in range(EMBEDDING_SIZE)]


class FakeRunner:
    """See the module. Raises `KVMismatch` and `PlanError` from `execute`."""

    def __init__(self, config: EngineConfig, script: FakeScript) -> None:
        if script.fail_start is not None:
            raise StartError(script.fail_start)
        time.sleep(script.start_seconds)
        self.script = script
        self._wait_while_held()
        self.block_size = config.block_size
        self.num_blocks = config.num_gpu_blocks_override or script.num_blocks
        self.num_host_blocks = script.num_host_blocks if config.swap_space else 0
        self.max_model_len = config.max_model_len or script.max_model_len
        self.vocab_size = script.vocab_size
        self.eos_token_ids = script.eos_token_ids
        self.steps = 0
        self._kernels: list[Kernel] | None = None  # one a step, while they are recorded
        self._last_step_id = 0
        self._slots: list[_Slot | None] = [None] * config.max_num_seqs
        self._device = [[0] * self.block_size for _ in range(self.num_blocks)]
        self._host = [[0] * self.block_size for _ in range(self.num_host_blocks)]

    def info(self, load_seconds: float) -> EngineInfo:
        return EngineInfo(
            model="fake",
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            embedding_size=EMBEDDING_SIZE,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype="float32",
            device="none",
            threads=1,
            path="fake",
            kv_cache_dtype="float32",
            kv_bytes=0,
            weight_bytes=0,
            load_seconds=load_seconds,
        )

    def start_preparation(self, on_change: Callable[[], None]) -> None:
        pass

    def compile_status(self) -> CompileStatus:
        return CompileStatus(mode="off", state="ready")

    def start_profile(self) -> None:
        self._kernels = []

    def stop_profile(self) -> Callable[[], tuple[Kernel, ...]]:
        assert self._kernels is not None, "start_profile comes first"
        kernels, self._kernels = tuple(self._kernels), None
        return lambda: kernels

    def kv_identity(self) -> dict[str, str]:
        return {"model": "fake", "block size": str(self.block_size)}

    def read_block(self, block: int) -> bytes:
        return struct.pack(f"<{self.block_size}Q", *self._device[block])

    def write_block(self, block: int, data: bytes) -> None:
        if len(data) != 8 * self.block_size:
            raise ValueError(f"a block has {8 * self.block_size} bytes, not {len(data)}")
        self._device[block] = list(struct.unpack(f"<{self.block_size}Q", data))

    def close(self) -> None:
        self._slots = []

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        try:
            rows = self._run(plan)
        except BaseException:
            for row in plan.rows:
                self._slots[row.slot] = None
            raise
        computing = time.perf_counter()
        time.sleep(self.script.step_seconds + self.script.token_seconds * plan.num_tokens)
        self._wait_while_held()
        end = time.perf_counter()
        if self._kernels is not None:
            now = time.monotonic()
            self._kernels.append(Kernel(name="fake", device="cpu", track=1, begin=now - (end - computing), end=now))
        return StepResult(step_id=plan.step_id, rows=rows, seconds=end - begin, model_seconds=end - computing)

    def _run(self, plan: StepPlan) -> tuple[SampledRow, ...]:
        self.steps += 1
        self._misbehave()
        if plan.step_id <= self._last_step_id:
            raise PlanError(f"step {plan.step_id} came after step {self._last_step_id}")
        self._last_step_id = plan.step_id
        # every source is read before any block is written, but the three kinds of transfer follow each other
        for source, target, pairs in (
            (self._device, self._host, plan.swap_out),
            (self._host, self._device, plan.swap_in),
            (self._device, self._device, plan.copies),
        ):
            contents = [list(source[a]) for a, _ in pairs]
            for (_, b), content in zip(pairs, contents, strict=True):
                target[b] = content
        for start in plan.starts:
            self._start(start)
        held = [self._holder(row) for row in plan.rows]
        written: dict[tuple[int, int], int] = {}
        for row, slot in zip(plan.rows, held, strict=True):
            if slot is not None:
                self._write(row, slot, written)
        return tuple(self._attend(row, slot) for row, slot in zip(plan.rows, held, strict=True))

    def _misbehave(self) -> None:
        script = self.script
        if self.steps not in (*script.raise_at_step, script.hang_at_step, script.exit_at_step):
            return
        if script.once is not None:
            if Path(script.once).exists():
                return
            Path(script.once).touch()
        if self.steps == script.exit_at_step:
            os._exit(1)
        while self.steps == script.hang_at_step:
            time.sleep(3600)
        raise RuntimeError(f"step {self.steps} raises because its script says so")

    def _wait_while_held(self) -> None:
        while self.script.held_by is not None and Path(self.script.held_by).exists():
            time.sleep(HELD_PAUSE_S)

    def _start(self, start: SlotStart) -> None:
        if not 1 <= start.num_prompt_tokens <= len(start.token_ids):
            raise PlanError(f"{start.request_id} starts with {len(start.token_ids)} tokens, {start.num_prompt_tokens} of them prompt")
        slot = _Slot(start=start, tokens=[], hashes=[])
        self._slots[start.slot] = slot
        prefix_hash = 1
        for token in start.token_ids:
            prefix_hash = _extend(prefix_hash, token)
            slot.tokens.append(token)
            slot.hashes.append(prefix_hash)

    def _holder(self, row: Row) -> _Slot | None:
        slot = self._slots[row.slot]
        return slot if slot is not None and slot.start.request_id == row.request_id else None

    def _write(self, row: Row, slot: _Slot, written: dict[tuple[int, int], int]) -> None:
        end = row.start + row.num_tokens
        if row.num_speculated:
            if not row.sample or row.num_tokens != len(row.token_ids) or end - row.num_speculated != len(slot.tokens):
                raise PlanError(f"{row.request_id} guesses {row.num_speculated} tokens elsewhere than behind its last one")
            for token in row.token_ids[-row.num_speculated :]:
                slot.push(token)
        if row.num_tokens < 1 or end > len(slot.tokens):
            raise PlanError(f"{row.request_id} computes positions {row.start} to {end - 1} of {len(slot.tokens)} tokens")
        if row.token_ids and list(row.token_ids) != slot.tokens[row.start : end]:
            raise PlanError(f"{row.request_id} has other tokens at positions {row.start} to {end - 1} than its history")
        if not row.token_ids and (row.num_tokens != 1 or end != len(slot.tokens)):
            raise PlanError(f"{row.request_id} names its latest sample at position {row.start}, which is not its last")
        if row.new_block_ids:
            if row.block_offset > len(slot.table):
                raise PlanError(f"{row.request_id} has {len(slot.table)} blocks and gets more at index {row.block_offset}")
            slot.table[row.block_offset :] = row.new_block_ids
        if len(slot.table) * self.block_size < end:
            raise PlanError(f"{row.request_id} has {len(slot.table)} blocks for {end} tokens")
        for position in range(row.start, end):
            index, offset = divmod(position, self.block_size)
            content = slot.hashes[position]
            place = (slot.table[index], offset)
            if written.setdefault(place, content) != content:
                raise KVMismatch(f"{row.request_id} writes position {position} to block {place[0]}, where another row of this step writes too")
            self._device[place[0]][offset] = content

    def _attend(self, row: Row, slot: _Slot | None) -> SampledRow:
        if slot is None:
            return SampledRow(request_id=row.request_id, error=LOST_SLOT)
        end = row.start + row.num_tokens
        for index in range(math.ceil(end / self.block_size)):
            wanted = slot.hashes[index * self.block_size : min(end, (index + 1) * self.block_size)]
            if self._device[slot.table[index]][: len(wanted)] != wanted:
                raise KVMismatch(f"{row.request_id} attends block {slot.table[index]} (index {index}), which does not hold its tokens")
        if self.script.nan_token is not None and self.script.nan_token in slot.tokens[:end]:
            return SampledRow(request_id=row.request_id, error=NON_FINITE)
        prompt_logprobs = self._prompt_logprobs(row, slot)
        if not row.sample:
            return SampledRow(request_id=row.request_id, prompt_logprobs=prompt_logprobs, pooled=self._pool(row, slot))
        if end != len(slot.tokens):
            raise PlanError(f"{row.request_id} samples after position {end - 1} of {len(slot.tokens)} tokens")
        slot.drop(row.num_speculated)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for guess in (*row.token_ids[len(row.token_ids) - row.num_speculated :], None):
            token_ids.append(self._next_token(slot))
            if slot.start.params.logprobs is not None:
                logprobs.append(self._logprobs(slot.hashes[-1], token_ids[-1], slot.start.params.logprobs))
            slot.push(token_ids[-1])
            if token_ids[-1] != guess:
                break
        return SampledRow(request_id=row.request_id, token_ids=tuple(token_ids), logprobs=tuple(logprobs) or None, prompt_logprobs=prompt_logprobs)

    def _likeliest(self, value: int) -> int:
        value = _mix(value)
        script = self.script
        if script.eos_every and value % script.eos_every == 0:
            return script.eos_token_ids[0]
        return script.low + (value >> 16) % ((script.high or self.vocab_size) - script.low)

    def _next_token(self, slot: _Slot) -> int:
        """End tokens, stop tokens, min_tokens and allowed_token_ids are honoured; what shapes a distribution has no meaning here."""
        params = slot.start.params
        value = slot.hashes[-1]
        if not params.greedy:
            name = f"{params.seed} {params.choice_index}".encode()
            value ^= int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        first = self._likeliest(value)
        if self.script.echo and len(slot.tokens) >= self.script.echo and _mix(value ^ 1) % 8:
            first = slot.tokens[-self.script.echo]
        choices = range(self.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        banned: set[int] = set()
        if len(slot.tokens) - slot.start.num_prompt_tokens < params.min_tokens:
            banned = {*slot.start.eos_token_ids, *params.stop_token_ids}
        allowed = [token for token in choices if token not in banned]
        if not allowed:
            raise PlanError(f"{slot.start.request_id} leaves no token to sample")
        return first if first in allowed else allowed[first % len(allowed)]

    def _logprobs(self, prefix_hash: int, token: int, count: int) -> TokenLogprobs:
        """A geometric distribution: the token of rank r has probability 2 ** -r, and the greedy one has rank 1."""
        first = self._likeliest(prefix_hash)
        rank = (token - first) % self.vocab_size + 1
        top = tuple(((first + i) % self.vocab_size, -(i + 1) * math.log(2)) for i in range(min(count, self.vocab_size)))
        return TokenLogprobs(token_id=token, logprob=-rank * math.log(2), rank=rank, top=top)

    def _pool(self, row: Row, slot: _Slot) -> bytes | None:
        """The vector of a position is a function of all tokens up to there; a mean must have been given each position once, in order."""
        pooling, end = slot.start.pooling, row.start + row.num_tokens
        if pooling is None:
            return None
        if pooling == "mean":
            if row.start != slot.num_pooled:
                raise PlanError(f"{row.request_id} pools position {row.start} after {slot.num_pooled} positions")
            for position in range(row.start, end):
                slot.sums = [a + b for a, b in zip(slot.sums, vector_of(slot.hashes[position]), strict=True)]
            slot.num_pooled = end
        if end < slot.start.num_prompt_tokens:
            return None
        vector = vector_of(slot.hashes[end - 1]) if pooling == "last" else [value / end for value in slot.sums]
        return struct.pack(f"<{EMBEDDING_SIZE}f", *vector)

    def _prompt_logprobs(self, row: Row, slot: _Slot) -> tuple[TokenLogprobs, ...] | None:
        count = slot.start.params.prompt_logprobs
        if count is None:
            return None
        last = min(row.start + row.num_tokens, slot.start.num_prompt_tokens - 1)
        return tuple(self._logprobs(slot.hashes[p - 1], slot.tokens[p], count) for p in range(row.start + 1, last + 1))


def make(config: EngineConfig) -> FakeRunner:
    """Factory for `EngineConfig.runner_factory`: "headrace.runner.fake:make"."""
    return FakeRunner(config, FakeScript.parse(config.model))
