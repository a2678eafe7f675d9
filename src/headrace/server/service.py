"""What all routes share: settings, the engine, the words of the model, and the bounds of the process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headrace.config import CompileStatus, EngineConfig, EngineInfo, ServerConfig
from headrace.core.explain import Explanation
from headrace.core.messages import SchedulerStats
from headrace.engine.embedding import Embedding, EmbeddingRequest
from headrace.engine.generation import ChoiceDelta, GenerationRequest
from headrace.engine.trace import Trace
from headrace.engine.wire import Heartbeat
from headrace.errors import EngineUnavailable, ModelNotFound
from headrace.observe.metrics import Metrics
from headrace.observe.tracing import Tracing
from headrace.server.admission import Admission
from headrace.server.auth import KeyRing
from headrace.server.body import BodyBudget
from headrace.server.logprobs import TokenTexts
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

INLINE_BYTES = 4096  # work on bodies up to this size takes about a millisecond and stays on the event loop
BODIES_AT_ONCE = 8  # how many bodies of the largest size the process holds

Result = TypeVar("Result")


class EngineState(Protocol):
    """The part of `EngineClient` that the server looks at."""

    @property
    def state(self) -> str: ...

    @property
    def stats(self) -> SchedulerStats | None: ...

    @property
    def restarts_total(self) -> int: ...

    @property
    def heartbeat(self) -> Heartbeat | None: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def compile(self) -> CompileStatus | None: ...

    async def explain(self, token_ids: tuple[int, ...], *, cache_salt: str | None = None, tenant: str = "") -> Explanation: ...

    async def trace(self, seconds: float, *, kernels: bool = False) -> Trace: ...


class TokenGenerator(Protocol):
    """The part of `Generator` that the server calls."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[ChoiceDelta]: ...

    async def embed(self, request: EmbeddingRequest) -> Embedding: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What there is once the engine has started."""

    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate
    generator: TokenGenerator
    token_texts: TokenTexts
    tool_call_parser: str = "auto"  # a name of text.tool_formats.FORMATS; auto: what the chat template shows
    reasoning_parser: str = "auto"  # a name of text.reasoning.FORMATS, or none

    @property
    def vocab_size(self) -> int:
        """Ids below it can be given and decoded; a model's table may be padded beyond the tokenizer's."""
        return min(self.info.vocab_size, self.tokenizer.vocab_size)


class Service:
    """One per process. `loaded` is set when the model is there; `draining` when the process is about to end."""

    def __init__(
        self, *, config: ServerConfig, engine: EngineState, model_names: tuple[str, ...], max_requests: int, tracing: Tracing | None = None
    ) -> None:
        self.config = config
        self.engine = engine
        self.tracing = tracing  # None: no spans are made
        self.model_names = model_names
        self.created = int(time.time())
        self.metrics = Metrics(model_name=model_names[0])
        self.admission = Admission(max_requests)
        self.keys = KeyRing(config.api_keys, config.limited_keys)
        self.bodies = BodyBudget(BODIES_AT_ONCE * config.max_body_bytes)
        self.loaded: LoadedModel | None = None
        self.draining = False
        self._workers = ThreadPoolExecutor(max_workers=min(4, (os.cpu_count() or 1) + 1), thread_name_prefix="headrace-text")

    @property
    def state(self) -> str:
        """starting | ready | draining | restarting | dead"""
        if self.draining:
            return "draining"
        if self.loaded is None and self.engine.state == "ready":
            return "starting"
        return self.engine.state

    def model(self) -> LoadedModel:
        """The model, if it can serve now; raises `EngineUnavailable`."""
        state = self.state
        if state != "ready" or self.loaded is None:
            reasons = {
                "starting": "The model is being loaded; try again when /ready says so.",
                "draining": "The server is shutting down; send the request to another one.",
                "restarting": "The engine failed and is being restarted; try again in a moment.",
            }
            raise EngineUnavailable(reasons.get(state, "The engine is not running."))
        return self.loaded

    def check_model_name(self, name: str | None) -> str:
        """The name to answer under. Without a name the request is for the only model there is."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            shown = name if len(name) <= 200 else name[:200] + "..."
            raise ModelNotFound(f"The model {shown!r} does not exist; GET /v1/models lists those that do.", param="model")
        return name

    async def offload(self, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run work on `size` bytes of input: here if it is little, else in a thread, so that the event loop goes on."""
        if size <= INLINE_BYTES:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
