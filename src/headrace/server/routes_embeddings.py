"""POST /v1/embeddings: one vector for each text, of length 1."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.core.messages import Pooling
from headrace.engine.embedding import Embedding, EmbeddingRequest, unit_vector
from headrace.engine.timeline import Watcher
from headrace.errors import ContextLengthExceeded, InvalidRequest, RequestError
from headrace.observe.metrics import BackgroundMetrics, RequestMetrics
from headrace.server.answer import Usage, translated
from headrace.server.auth import NO_LIMITS
from headrace.server.body import decode_object, read_body
from headrace.server.generation_route import background_tenant, until_disconnect
from headrace.server.parse import encode_prompt, prompt_list
from headrace.server.rate_limits import KeyLimits
from headrace.server.request_span import RequestSpan
from headrace.server.request_timeout import earlier, timeout_ms
from headrace.server.schema import EmbeddingBody, validate
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import encode, send_encoded

if TYPE_CHECKING:
    import numpy as np

MAX_INPUTS = 2048  # in one request, as OpenAI allows
INPUTS_AT_ONCE = 64  # of one request in the engine: a long list does not fill its queue


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedEmbeddings:
    model: str  # the name to answer under
    inputs: tuple[tuple[int, ...], ...]
    as_base64: bool
    dimensions: int | None
    priority: int
    deadline_ms: int | None
    cache_salt: str | None

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.inputs)


def parse(body: bytes, service: Service, model: LoadedModel) -> ParsedEmbeddings:
    checked = validate(EmbeddingBody, decode_object(body))
    name = service.check_model_name(checked.model)
    size = model.info.embedding_size
    if checked.dimensions is not None and not 1 <= checked.dimensions <= size:
        raise InvalidRequest(f"dimensions must be from 1 to {size}, the size of this model's vectors, not {checked.dimensions}.", param="dimensions")
    bounded = checked.truncate_prompt_tokens is None
    special = checked.add_special_tokens is not False

    def encoded(text: str) -> tuple[int, ...]:
        return encode_prompt(text, model, add_special_tokens=special, bounded=bounded, param="input")

    inputs = prompt_list(checked.input, model, encoded, param="input", limit=MAX_INPUTS)
    return ParsedEmbeddings(
        model=name,
        inputs=tuple(fit(ids, checked.truncate_prompt_tokens, model) for ids, _ in inputs),
        as_base64=checked.encoding_format == "base64",
        dimensions=checked.dimensions,
        priority=checked.priority or 0,
        deadline_ms=checked.deadline_ms,
        cache_salt=checked.cache_salt,
    )


def fit(ids: tuple[int, ...], truncate: int | None, model: LoadedModel) -> tuple[int, ...]:
    """The ids, or their last `truncate` ones (-1: as many as the context holds). Raises `ContextLengthExceeded` and `InvalidRequest`."""
    context = model.info.max_model_len
    if not ids:
        raise InvalidRequest("input must hold at least one token; an empty text has none.", param="input")
    if truncate is not None:
        if truncate != -1 and not 1 <= truncate <= context:
            raise InvalidRequest(f"truncate_prompt_tokens must be -1 or from 1 to {context}, not {truncate}.", param="truncate_prompt_tokens")
        return ids[-(context if truncate == -1 else truncate) :]
    if len(ids) > context:
        raise ContextLengthExceeded(
            f"This model's context length is {context} tokens, but an input has {len(ids)}; shorten it, or set truncate_prompt_tokens.", param="input"
        )
    return ids


async def embed_all(
    request: ParsedEmbeddings,
    model: LoadedModel,
    metrics: RequestMetrics,
    *,
    pooling: Pooling,
    tenant: str,
    arrival: float,
    background: bool,
    watcher: Watcher | None,
) -> list[Embedding]:
    """The embeddings in the order of the inputs. Raises the first `RequestError`; the other inputs are aborted then."""
    window = asyncio.Semaphore(INPUTS_AT_ONCE)
    answer_id = f"embd-{uuid.uuid4().hex}"

    async def one(index: int, ids: tuple[int, ...]) -> Embedding:
        async with window:
            embedding = await model.generator.embed(
                EmbeddingRequest(
                    request_id=f"{answer_id}-{index}",
                    prompt_token_ids=ids,
                    pooling=pooling,
                    priority=request.priority,
                    deadline=None if request.deadline_ms is None else arrival + request.deadline_ms / 1000,
                    tenant=tenant,
                    cache_salt=request.cache_salt,
                    background=background,
                    watcher=watcher,
                )
            )
        metrics.prompt(len(ids))
        metrics.finished("stop", time.monotonic() - arrival, 0)
        return embedding

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, ids)) for index, ids in enumerate(request.inputs)]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise (translated(first, "input") if isinstance(first, RequestError) else first) from None
    return [task.result() for task in tasks]


def body_of(request: ParsedEmbeddings, embeddings: list[Embedding]) -> bytes:
    """The answer as JSON. Thread-safe; an item at a time, so that other threads get their turn between two of them."""
    items = (encode(item(index, unit_vector(each.vector, request.dimensions), request.as_base64)) for index, each in enumerate(embeddings))
    usage = {"prompt_tokens": request.num_tokens, "total_tokens": request.num_tokens}
    head = b'{"object":"list","model":' + encode(request.model) + b',"usage":' + encode(usage)
    return head + b',"data":[' + b",".join(items) + b"]}"


def item(index: int, vector: np.ndarray, as_base64: bool) -> dict[str, Any]:
    value = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
    return {"object": "embedding", "index": index, "embedding": value}


class EmbeddingsRoute:
    """An ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = time.monotonic()
        service = self._service
        service.model()  # refuses at once where nothing can be served
        scope["state"]["limits"].take_request()
        scope["state"]["timeout_ms"] = timeout_ms(scope)
        config = service.config
        with service.bodies.lease() as lease:
            body = await read_body(receive, Headers(scope=scope), max_bytes=config.max_body_bytes, timeout=config.body_timeout, lease=lease)
            with service.admission.permit():
                work = self._answer(body, service.metrics, tenant=scope["state"]["tenant"], arrival=arrival, background=False, state=scope["state"])
                del body
                answer = await until_disconnect(receive, work)
        await send_encoded(send, answer)

    async def in_background(self, body: bytes, tenant: str) -> bytes:
        """See `GenerationRoute.in_background`."""
        metrics = BackgroundMetrics(self._service.metrics)
        return await self._answer(
            body,
            metrics,
            tenant=background_tenant(tenant),
            arrival=time.monotonic(),
            background=True,
            state={"limits": NO_LIMITS, "timeout_ms": None},
        )

    async def _answer(self, body: bytes, metrics: RequestMetrics, *, tenant: str, arrival: float, background: bool, state: dict[str, Any]) -> bytes:
        """`state["usage"]` is set once the tokens are counted; `state` has the key's `limits`, the header's `timeout_ms`, and maybe a `span`."""
        service = self._service
        model = service.model()
        span: RequestSpan | None = state.get("span")
        with nullcontext() if span is None else span.part("tokenize"):
            request = await service.offload(len(body), parse, body, service, model)
        state["usage"] = Usage(prompt_tokens=request.num_tokens)
        limits: KeyLimits = state["limits"]
        limits.charge(prompt_tokens=request.num_tokens, answer_tokens=0)
        deadline_ms = earlier(request.deadline_ms, state["timeout_ms"])
        request = replace(request, priority=limits.priority(request.priority), deadline_ms=deadline_ms)
        pooling = service.config.pooling
        if span is not None:
            span.asks_for_vectors(request.model, state["usage"])
        embeddings = await embed_all(request, model, metrics, pooling=pooling, tenant=tenant, arrival=arrival, background=background, watcher=span)
        return await service.offload(sum(each.vector.nbytes for each in embeddings), body_of, request, embeddings)


def routes(service: Service) -> list[Route]:
    return [Route("/v1/embeddings", EmbeddingsRoute(service), methods=["POST"])]
