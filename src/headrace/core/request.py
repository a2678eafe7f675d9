"""One request in the scheduler: its state and a few counters; all else is derived."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from headrace.core.kv_manager import BlockTable, InFlight
from headrace.core.messages import AddRequest, TokenLogprobs
from headrace.core.policy import QueueKey, Rank


class RequestState(Enum):
    WAITING = "waiting"  # never ran; holds nothing
    RUNNING = "running"  # holds a slot and device blocks for all its known tokens
    PREEMPTED = "preempted"  # ran; holds nothing and is computed again
    SWAPPED = "swapped"  # ran; its blocks are in host memory
    FINISHED = "finished"  # its terminal output is made; holds nothing


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.PREEMPTED, RequestState.SWAPPED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    # to PREEMPTED: the step that should have copied its blocks failed
    RequestState.SWAPPED: frozenset({RequestState.RUNNING, RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    message: AddRequest
    seq: int  # counts additions; breaks ties
    rank: Rank  # oldest or most urgent first: who keeps its blocks
    queue_key: QueueKey  # who leaves the queue first
    max_total_tokens: int  # prompt and answer at most, from max_tokens and max_model_len
    table: BlockTable
    in_group: bool = False  # another choice of the same request (n > 1) is in the engine: this one counts as a part of it
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt and known answer
    num_computed: int = 0  # positions whose KV exists once all plans made so far have run
    num_pending: int = 0  # samples that plans draw and that are not known yet; at most one when a plan is begun
    slot: int = -1  # row of the runner's buffers while RUNNING
    needs_start: bool = False  # the runner does not know about the slot yet
    num_sent_blocks: int = 0  # blocks of the table that the runner knows
    admitted_step: int = 0  # step in which it last started to run
    planned_step: int = 0  # the last step with a row of it
    num_cached: int | None = None  # prompt tokens that needed no computing; None before it first ran
    num_computed_before: int = 0  # highest num_computed ever: below it, computing is repeating
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of positions 1 .. len
    has_output: bool = False  # an output was made; the next one has no cached_tokens
    waits_for: InFlight | None = None  # why the queue passed over it last
    # facts of the message that every step asks for
    num_prompt: int = field(init=False)
    num_positions: int = field(init=False)  # most that are ever computed: the last token's is not
    samples: bool = field(init=False)  # False for a request that only scores its prompt

    def __post_init__(self) -> None:
        self.token_ids.extend(self.message.prompt_token_ids)
        self.num_prompt = len(self.message.prompt_token_ids)
        self.num_positions = max(self.max_total_tokens - 1, self.num_prompt)
        self.samples = self.max_total_tokens > self.num_prompt

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def background(self) -> bool:
        return self.message.background

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.message.params.prompt_logprobs is not None

    @property
    def needs_every_position(self) -> bool:
        """What it asks for comes from all positions of its prompt: each is computed, none is taken from the prefix cache."""
        return self.wants_prompt_logprobs or self.message.pooling == "mean"

    @property
    def num_remaining(self) -> int:
        """Positions to compute before the next sample; 0 where the last one allowed is planned already."""
        known = len(self.token_ids) + self.num_pending
        return (known if known < self.num_positions else self.num_positions) - self.num_computed

    def move_to(self, state: RequestState) -> None:
        assert state in TRANSITIONS[self.state], f"request {self.request_id} cannot go from {self.state.value} to {state.value}"
        self.state = state

    def check(self) -> None:
        assert self.num_pending in (0, 1, 2)
        assert self.num_prompt <= len(self.token_ids)
        assert len(self.token_ids) + self.num_pending <= self.max_total_tokens
        assert 0 <= self.num_computed <= len(self.token_ids) + self.num_pending
        assert len(self.prompt_logprobs) < self.num_prompt
        running = self.state is RequestState.RUNNING
        assert (self.slot >= 0) == running
        assert bool(self.table.blocks) == running
        assert bool(self.table.host_blocks) == (self.state is RequestState.SWAPPED)
        if self.state in (RequestState.WAITING, RequestState.PREEMPTED):
            assert self.num_computed == 0
        if self.num_pending and running:
            assert self.num_computed == len(self.token_ids) + self.num_pending - 1
