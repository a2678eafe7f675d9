"""Which tokens the grammar of each slot allows next.

The mask for a slot's next token is worked out in a thread from the moment its last token is known, in the shadow of the forward pass, and is
mostly there when the logits are. A grammar can be so hostile that one mask takes seconds; nothing can interrupt that. So a step waits for
masks only so long, and what a request's masks cost is added up: beyond either bound that request fails, alone.

Legend: R rows, V vocabulary of the model, W words of 32 bits that hold a mask.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.core.messages import SlotStart
from headrace.runner.interface import GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_WAIT_S = 1.0  # of one step, for masks
FREE_S = 1.0  # what the masks of a request may cost at first, in seconds of a core,
FREE_S_PER_TOKEN = 0.005  # and more with each token
_NEVER = float("-inf")
# What eight tokens get for each byte of a mask. Adding these takes the same time whatever the pattern; a fill under a mask may take four times it.
_PENALTIES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, _NEVER).astype(np.float32)
_PATIENCE_S = 0.05  # a mask that takes longer is given a thread of its own

NO_GRAMMAR = "the grammar of this request is not there"
TOO_SLOW = "the grammar takes too long at each token; make the schema or the expression simpler"


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """One mask in the making."""

    matcher: LLMatcher
    mask_W: np.ndarray  # int32
    begin: float = 0.0  # monotonic seconds
    done: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0  # of a core


@dataclass(slots=True, kw_only=True, eq=False)
class _Constraint:
    """The grammar of a slot's request."""

    matcher: LLMatcher
    num_words: int
    hidden_ends: np.ndarray  # int64: end tokens that the request is to ignore
    job: _Job | None = None  # of the next token's mask; None: the grammar is complete
    num_tokens: int = 0  # taken by the matcher since the slot's start
    seconds: float = 0.0  # what the masks have cost


class GrammarMasks:
    """The grammars of all slots. Only the runner's thread calls this."""

    def __init__(self, source: GrammarSource | None, *, num_slots: int, num_threads: int) -> None:
        self._source = source
        self.seconds = 0.0  # of a core, that all masks have cost
        self._workers = _Workers(num_threads)
        self._constraints: list[_Constraint | None] = [None] * num_slots

    def start(self, start: SlotStart) -> str | None:
        """Forgets whoever was in the slot. Returns why the request's grammar can't be followed, or None."""
        self._constraints[start.slot] = None
        if start.params.structured is None:
            return None
        matcher = None if self._source is None else self._source.new_matcher(start.request_id)
        if matcher is None or self._source is None:
            return NO_GRAMMAR
        answer = start.token_ids[start.num_prompt_tokens :]
        if answer and not matcher.consume_tokens(list(answer)):
            return _fault(matcher)
        ends = np.asarray(sorted(set(self._source.end_token_ids) - set(start.eos_token_ids)), dtype=np.int64)
        constraint = _Constraint(matcher=matcher, num_words=-(-self._source.num_tokens // 32), hidden_ends=ends)
        self._constraints[start.slot] = constraint
        self._begin(constraint)
        return None

    def holds(self, slot: int) -> bool:
        return self._constraints[slot] is not None

    def wait(self, slots: Sequence[int]) -> dict[int, str]:
        """Returns when the masks of the slots are there: why the others have none, by slot."""
        faults: dict[int, str] = {}
        deadline = time.monotonic() + MAX_WAIT_S
        for slot in slots:
            constraint = self._constraints[slot]
            if constraint is None or constraint.job is None:
                faults[slot] = NO_GRAMMAR
                continue
            job = constraint.job
            while not job.done.wait(min(_PATIENCE_S, max(0.0, deadline - time.monotonic()))) and time.monotonic() < deadline:
                self._workers.refill()
            if not job.done.is_set():
                self._constraints[slot] = None  # its matcher belongs to the thread that is lost in it
                faults[slot] = TOO_SLOW
            elif constraint.matcher.is_error():
                faults[slot] = _fault(constraint.matcher)
            else:
                constraint.seconds += job.seconds
                self.seconds += job.seconds
                job.seconds = 0.0
                if constraint.seconds > FREE_S + FREE_S_PER_TOKEN * constraint.num_tokens:
                    faults[slot] = TOO_SLOW
        return faults

    def ends_only(self, slot: int, end_ids: np.ndarray) -> bool:
        """Whether the slot's grammar allows nothing but some of `end_ids` now."""
        constraint = self._constraints[slot]
        return constraint is not None and constraint.job is not None and not _without(constraint.job.mask_W, end_ids).any()

    def apply(self, logits_RV: Tensor, rows: Iterable[int], slots: Iterable[int]) -> None:
        """Puts -inf where the grammars of these rows allow no token. `wait` has been called; slots without a mask are left as they are."""
        chosen = [(row, job.mask_W) for row, slot in zip(rows, slots, strict=True) if (job := self._ready(slot)) is not None]
        if not chosen:
            return
        if logits_RV.device.type == "cpu":
            for row, mask_W in chosen:
                _forbid(logits_RV[row].numpy(), mask_W)
            return
        mask_RW = torch.from_numpy(np.stack([mask_W for _, mask_W in chosen])).to(logits_RV.device)
        index_R = torch.tensor([row for row, _ in chosen], device=logits_RV.device)
        allowed_RV = _unpack(mask_RW, logits_RV.shape[1])
        logits_RV[index_R] = logits_RV[index_R].masked_fill_(~allowed_RV, _NEVER)

    def consume(self, slot: int, token_id: int) -> tuple[bool, str | None]:
        """Takes the slot's new token: (nothing can follow, why the grammar can't be followed any more)."""
        constraint = self._constraints[slot]
        assert constraint is not None
        constraint.job = None
        matcher = constraint.matcher
        if not matcher.consume_token(token_id) or matcher.is_error():
            return False, _fault(matcher)
        constraint.num_tokens += 1
        if matcher.is_stopped():
            return True, None
        self._begin(constraint)
        return False, None

    def close(self) -> None:
        """Ends the threads. A thread that is in the library when the interpreter ends would take the process down with it."""
        self._workers.close()

    def _begin(self, constraint: _Constraint) -> None:
        constraint.job = _Job(matcher=constraint.matcher, mask_W=np.zeros(constraint.num_words, dtype=np.int32))
        self._workers.put(constraint.job)

    def _ready(self, slot: int) -> _Job | None:
        constraint = self._constraints[slot]
        if constraint is None or constraint.job is None or not constraint.job.done.is_set():
            return None
        job = constraint.job
        if len(constraint.hidden_ends):
            rest_W = _without(job.mask_W, constraint.hidden_ends)
            if rest_W.any():  # else the answer can only end, whether or not its end is to be ignored
                job.mask_W = rest_W
        return job


class _Workers:
    """Threads that make masks, started with the first one. The library lets go of the interpreter lock meanwhile."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._num_alive = 0
        self._running: set[_Job] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def put(self, job: _Job) -> None:
        self.refill()
        self._jobs.put(job)

    def refill(self) -> None:
        """Starts a thread for each one that is lost in a slow mask."""
        with self._lock:
            missing = self._num_threads - self._num_free()
            self._num_alive += max(0, missing)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(missing):
            self._threads.append(threading.Thread(target=self._run, name="grammar masks", daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """Ends the threads, but for those that are lost in a mask."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + MAX_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _num_free(self) -> int:
        late = time.monotonic() - _PATIENCE_S
        return self._num_alive - sum(job.begin < late for job in self._running)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                job.begin = time.monotonic()
                self._running.add(job)
            begin = time.thread_time()
            job.matcher.unsafe_compute_mask_ptr(job.mask_W.ctypes.data, job.mask_W.nbytes)
            job.seconds = time.thread_time() - begin
            with self._lock:
                self._running.remove(job)
                surplus = self._num_free() > self._num_threads
                self._num_alive -= surplus
            job.done.set()
            if surplus:
                return


def _fault(matcher: LLMatcher) -> str:
    return "the grammar cannot be followed: " + matcher.get_error().split("\n<", 1)[0].strip()[:300]


def _without(mask_W: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The mask with the bits of `ids` off."""
    mask_W = mask_W.copy()
    known = ids[ids < 32 * len(mask_W)]
    np.bitwise_and.at(mask_W, known // 32, ~(np.int32(1) << (known % 32).astype(np.int32)))
    return mask_W


def _forbid(logits_V: np.ndarray, mask_W: np.ndarray) -> None:
    """A row on the host, in place. Tokens beyond the mask, of a model whose table is larger than the vocabulary, are forbidden."""
    size = min(len(logits_V), 32 * len(mask_W))
    logits_V[:size] += _PENALTIES[mask_W.view(np.uint8)].reshape(-1)[:size]
    logits_V[size:] = _NEVER


def _unpack(mask_RW: Tensor, vocab_size: int) -> Tensor:
    """bool [R, V] on the masks' device: the words cross to it, not the bits."""
    bit_B = torch.arange(32, dtype=torch.int32, device=mask_RW.device)
    allowed_RV = ((mask_RW[:, :, None] >> bit_B) & 1).bool().flatten(1)
    missing = vocab_size - allowed_RV.shape[1]
    return torch.nn.functional.pad(allowed_RV, (0, missing)) if missing > 0 else allowed_RV[:, :vocab_size]
