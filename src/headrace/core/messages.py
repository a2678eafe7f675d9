"""The messages between client, scheduler and runner. Frozen; nothing in them is shared and mutable.

Client -> engine: `AddRequest`, `AbortRequest`. Scheduler -> runner: `StepPlan`. Runner -> scheduler: `StepResult`.
Engine -> client: `TokenOutput`; every accepted request id ends in exactly one output with a `finish_reason`.
All times are seconds on the machine's monotonic clock, the same in both processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.core.step_work import NO_WORK, StepWork
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dataclasses import dataclass as row_dataclass
else:

    def row_dataclass(*, frozen: bool, **options: Any) -> Any:
        """Of messages that each row of each step has one of: only the type checker holds them frozen. A frozen dataclass sets its fields one by one
        through `object.__setattr__`, which takes three times as long as making it does otherwise."""
        assert frozen
        return dataclass(unsafe_hash=True, **options)


FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["last", "mean"]  # how the hidden states of a prompt become one vector: the last position's, or the mean of all


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    request_id: str  # unique among the requests in the engine; made by the client
    prompt_token_ids: tuple[int, ...]  # at least one
    params: SamplingParams  # max_tokens resolved to a number by the client
    arrival: float  # when the client accepted it
    eos_token_ids: tuple[int, ...] = ()  # all end tokens of the model; empty where ignore_eos
    priority: int = 0  # lower runs first
    deadline: float | None = None  # absolute; the first token after it is worthless
    tenant: str = ""  # whom the work is accounted to (fairness between API keys)
    cache_salt: str | None = None  # prefix blocks are found only under the salt they were stored with
    session_id: str | None = None  # keeps the conversation's blocks under a lease after the end
    fork_of: str | None = None  # id of choice 0 of the same request (n > 1), whose prompt blocks are shared copy-on-write
    background: bool = False  # nobody waits for it: it runs in what others leave, after every priority
    pooling: Pooling | None = None  # the prompt's vector is asked for and no token (params.max_tokens is 0)
    traced: bool = False  # the engine tells at its end what it went through: see `engine.timeline`


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    request_id: str
    reason: Literal["abort", "stop"] = "abort"  # stop: the client saw a stop string; the end is a success


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStart:
    """A request takes a slot, new or back from preemption. The runner (re)builds all of the slot's state from this."""

    request_id: str
    slot: int  # row of the runner's persistent buffers, < max_num_seqs
    token_ids: tuple[int, ...]  # prompt and what was generated so far; all known
    num_prompt_tokens: int  # the first so many of token_ids are the prompt
    params: SamplingParams
    eos_token_ids: tuple[int, ...]  # masked before min_tokens
    pooling: Pooling | None = None  # of the prompt, due with the row that computes its last position


@row_dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The part of one request in a step: positions start .. start + num_tokens - 1 are computed."""

    request_id: str
    slot: int
    start: int  # position of the first token computed = tokens whose KV is there already
    num_tokens: int  # >= 1
    token_ids: tuple[int, ...]  # the tokens at these positions; empty: one token, the slot's latest sample, not yet known here
    block_offset: int  # new_block_ids stand at this index of the slot's block table (0 on a start: the whole table)
    new_block_ids: tuple[int, ...]
    sample: bool  # the last position yields a token
    num_speculated: int = 0  # the last so many of token_ids are guesses behind the last known token (sample is True); see `SampledRow`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of the engine. The runner does, in this order: swap_out, swap_in, copies, starts, then all rows at once.

    Plans run in the order they were made, one at a time, and always to their end: blocks freed after a plan was made are written by
    it before any later plan may reuse them. Within a step the keys and values of all rows are written before any row attends (layer by
    layer), so a row may share blocks that another row of the same step fills.
    """

    step_id: int  # counts up from 1
    rows: tuple[Row, ...]
    starts: tuple[SlotStart, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()  # (device block, host block)
    swap_in: tuple[tuple[int, int], ...] = ()  # (host block, device block)
    copies: tuple[tuple[int, int], ...] = ()  # (from device block, to device block): copy on write
    work: StepWork = NO_WORK  # what its rows are together, for those who ask how long it takes; the runner does not

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities at one position, of the raw logits before any penalty, mask or temperature; all finite."""

    token_id: int  # the token that stands there
    logprob: float
    rank: int  # 1: likeliest
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (id, logprob), likeliest first


@row_dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """Behind a row's last known token and behind each of its guesses a token is sampled, as it would be if the guesses were its history. They
    are new tokens up to the first that is no guess, that one included."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new tokens; empty for a row with sample=False or with an error
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per new token, where params.logprobs asked for it
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt tokens that this row's logits score: positions start+1 ..
    pooled: bytes | None = None  # the prompt's vector where it is due: little-endian float32, not normalised
    complete: bool = False  # the grammar of params.structured allows nothing more: the request ends here
    error: str | None = None  # this row alone failed (non-finite logits, ...)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step_id: int
    rows: tuple[SampledRow, ...]  # every row of the plan, in its order
    seconds: float  # wall time of the runner in this step
    model_seconds: float = 0.0  # of it in the model; the rest went into inputs, sampling and copies
    input_seconds: float = 0.0  # of it in making tensors of the rows
    sample_seconds: float = 0.0  # of it in picking tokens; on CUDA that waits for the model, and counts as the model's
    padded_tokens: int = 0  # computed beside the plan's only to fill a static shape
    path: str = "ready"  # what computed it: the ready path, or a compiled one by its name (see `config.PathStatus`)
    compiled: bool = False  # torch.compile worked in it, so its time says nothing about the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operator on the CPU or kernel on a device that a step ran. Times are seconds of the monotonic clock."""

    name: str
    device: str  # cpu, or cuda:N
    track: int  # thread of the CPU, stream of the device: what is on one track is nested or one after the other
    begin: float
    end: float


@row_dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    request_id: str
    token_ids: tuple[int, ...] = ()  # new since the last output
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per new token
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # whole, on the first output with a token; position 0 has none
    cached_tokens: int | None = None  # prompt tokens taken from the prefix cache; on the first output
    pooled: bytes | None = None  # the vector of a pooling request, on its only output: see `SampledRow`
    finish_reason: FinishReason | None = None  # set on the last output, and only there
    stop_reason: int | None = None  # the stop token id that ended it, if one of params.stop_token_ids
    ends_in_text: bool = False  # with finish_reason stop: the last token is none that ends answers, but text like those before it
    error_code: str | None = None  # with finish_reason error: see headrace.errors (queue_full, context_length_exceeded, ...)
    error_message: str | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot for metrics. Totals count up and never fall."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_free_blocks: int  # not held by any request (cached ones count as free)
    num_cached_blocks: int  # findable by hash, held or not
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    preemptions_recompute_total: int
    preemptions_swap_total: int
    recomputed_tokens_total: int
    spec_drafts_total: int = 0  # rows with guesses
    spec_draft_tokens_total: int = 0  # guesses
    spec_accepted_tokens_total: int = 0  # guesses that were right
    spec_rejected_tokens_total: int = 0
    prefix_miss_new_tokens_total: int = 0  # of the tokens looked up and not found, by why: see `core.prefix_misses`
    prefix_miss_evicted_tokens_total: int = 0
    prefix_miss_other_salt_tokens_total: int = 0
    prefix_miss_partial_tokens_total: int = 0
    kv_sampled_positions_total: int = 0  # in blocks that requests hold, each time that this snapshot is made
    kv_unused_positions_total: int = 0  # those of them behind the tokens that there are
    num_evictable_blocks: int = 0  # findable and not held: the cached ones among the free
