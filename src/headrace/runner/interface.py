"""What the engine asks of a runner. No torch here: the engine and its tests import this without loading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from headrace.config import CompileStatus, EngineInfo
from headrace.core.messages import Kernel, StepPlan, StepResult

if TYPE_CHECKING:
    from llguidance import LLMatcher

# SampledRow.error of rows that fail alone
LOST_SLOT = "the slot of this row is not held by its request"
NON_FINITE = "non-finite logits"


class Runner(Protocol):
    """Runs plans on a device, one at a time, in the order they were made.

    The attributes and `info` are known once the runner is made and never change.
    """

    num_blocks: int  # device KV blocks
    num_host_blocks: int  # host KV blocks for swapped requests
    block_size: int  # tokens in a block
    max_model_len: int  # most tokens of one request, prompt and answer
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # all end tokens of the model

    def info(self, load_seconds: float) -> EngineInfo:
        """The facts a started engine tells its clients; `load_seconds` is what the start took."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one plan to its end and returns a result for each of its rows, in their order.

        A row that alone went wrong has `SampledRow.error`; so has a row whose slot its request does not hold any more, because the
        step that was to start it raised. An exception means that the whole step failed: the slots of its rows are empty then.
        """
        ...

    def start_preparation(self, on_change: Callable[[], None]) -> None:
        """Begins to prepare faster paths beside the steps that run, and returns at once; called once, when the engine serves.

        `on_change` is told, from any thread, when `compile_status` has moved.
        """
        ...

    def compile_status(self) -> CompileStatus:
        """A snapshot, from any thread."""
        ...

    def start_profile(self) -> None:
        """From now on every kernel of the steps is recorded, which makes them slower. From the thread that executes."""
        ...

    def stop_profile(self) -> Callable[[], tuple[Kernel, ...]]:
        """Ends it, from the thread that executes; what it returns gives the kernels, from any thread, and may take a second."""
        ...

    def kv_identity(self) -> dict[str, str]:
        """What must be the same, name by name, for the content of a block to mean the same to another runner."""
        ...

    def read_block(self, block: int) -> bytes:
        """What a device block holds. Only while no plan is executed."""
        ...

    def write_block(self, block: int, data: bytes) -> None:
        """Fill a device block with what `read_block` gave. ValueError where that does not fit. Only while no plan is executed."""
        ...

    def close(self) -> None:
        """Gives memory and threads back. Nothing may be executed afterwards."""
        ...


class GrammarSource(Protocol):
    """Where the compiled grammars are."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that a grammar allows where the answer may end."""

    @property
    def num_tokens(self) -> int:
        """Tokens that masks speak of: one bit each."""

    def new_matcher(self, request_id: str) -> LLMatcher | None:
        """A matcher at the start of the request's answer; None where the request has ended."""
