"""From a prompt of tokens to its vector."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.config import EngineInfo
from headrace.core.messages import AddRequest, Pooling
from headrace.engine.client import EngineClient
from headrace.engine.engine_requests import check_fields, check_ids
from headrace.engine.timeline import Watcher
from headrace.errors import ContextLengthExceeded, EngineUnavailable, InvalidRequest
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np  # where it is used, too: a server without embeddings does not hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """One prompt whose vector is wanted."""

    request_id: str  # unique among the requests that run
    prompt_token_ids: tuple[int, ...]  # at least one
    pooling: Pooling = "last"
    priority: int = 0  # lower runs first
    deadline: float | None = None  # monotonic seconds; a later vector is worthless
    tenant: str = ""
    cache_salt: str | None = None
    background: bool = False  # nobody waits for it
    watcher: Watcher | None = None  # where it is traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    vector: np.ndarray  # float32 [E], as the model has it
    cached_tokens: int  # prompt tokens taken from the prefix cache


def pooling_request(request: EmbeddingRequest, info: EngineInfo) -> AddRequest:
    """Raises `ContextLengthExceeded` and `InvalidRequest`."""
    check_fields(request, ("request_id", "tenant", "cache_salt"))
    length = len(request.prompt_token_ids)
    if length == 0:
        raise InvalidRequest("The prompt has no tokens; at least one is needed.", param="prompt")
    if length > info.max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {length} tokens, but the context holds {info.max_model_len}: shorten the prompt.", param="prompt"
        )
    check_ids("prompt", request.prompt_token_ids, info.vocab_size)
    return AddRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=SamplingParams(max_tokens=0),
        arrival=time.monotonic(),
        priority=request.priority,
        deadline=request.deadline,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        background=request.background,
        traced=request.watcher is not None,
        pooling=request.pooling,
    )


async def embed(client: EngineClient, request: EmbeddingRequest) -> Embedding:
    """Raises any `RequestError`. Cancelling it ends the engine's part too."""
    import numpy as np

    if client.info is None:
        raise client.unavailable()
    async with aclosing(client.submit(pooling_request(request, client.info), request.watcher)) as outputs:
        async for output in outputs:
            if output.pooled is not None:
                return Embedding(vector=np.frombuffer(output.pooled, dtype="<f4"), cached_tokens=output.cached_tokens or 0)
    raise EngineUnavailable("The engine ended this request before it was complete.")


def unit_vector(vector: np.ndarray, dimensions: int | None = None) -> np.ndarray:
    """The first `dimensions` numbers (None: all), scaled to length 1, as little-endian float32; a vector of zeros stays as it is."""
    import numpy as np

    values = vector[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(values))
    return (values / length if length else values).astype("<f4")
