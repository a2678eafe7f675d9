"""An engine in a few lines, so that the server is tested without one; and a real engine around the fake runner."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np

from headrace.config import CompileStatus, EngineConfig, EngineInfo, ServerConfig
from headrace.core.explain import Explanation, Query, explain
from headrace.core.kv_manager import KVManager
from headrace.core.messages import SchedulerStats, TokenLogprobs
from headrace.engine.embedding import Embedding, EmbeddingRequest
from headrace.engine.generation import ChoiceDelta, GenerationRequest
from headrace.engine.trace import Trace
from headrace.engine.wire import Heartbeat
from headrace.errors import EngineUnavailable
from headrace.runner.fake import FakeRunner, FakeScript
from headrace.server.app import create_app
from headrace.server.batch_service import BatchService
from headrace.server.logprobs import TokenTexts
from headrace.server.service import LoadedModel, Service
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import write_byte_tokenizer

CONTEXT = 512
ANSWER = "Hé, wörld! "
STATS = SchedulerStats(
    num_running=1,
    num_waiting=2,
    num_swapped=0,
    num_blocks=10,
    num_free_blocks=4,
    num_cached_blocks=3,
    prompt_tokens_total=0,
    generation_tokens_total=0,
    prefix_query_tokens_total=100,
    prefix_hit_tokens_total=40,
    preemptions_recompute_total=2,
    preemptions_swap_total=1,
    recomputed_tokens_total=7,
)


class FakeEngine:
    """What the server sees of the client."""

    def __init__(self) -> None:
        self.state = "ready"
        self.stats: SchedulerStats | None = STATS
        self.restarts_total = 0
        self.heartbeat: Heartbeat | None = None
        self.config = EngineConfig(model="fake", max_num_seqs=16)
        self.compile: CompileStatus | None = None
        self.kv = KVManager(num_blocks=16, block_size=4)

    async def explain(self, token_ids: tuple[int, ...], *, cache_salt: str | None = None, tenant: str = "") -> Explanation:
        return explain(self.kv, Query(query_id=0, token_ids=token_ids, cache_salt=cache_salt, tenant=tenant), now=100.0)

    async def trace(self, seconds: float, *, kernels: bool = False) -> Trace:
        if self.state != "ready":
            raise EngineUnavailable("The engine has died and is being restarted.")
        return Trace(begin=0.0, end=seconds)


def score(token_id: int, count: int | None) -> TokenLogprobs:
    top = tuple((other, -0.5 - 0.1 * rank) for rank, other in enumerate([token_id, *range(200, 219)]))
    return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top[: count or 0])


def state_of(prompt: bytes) -> list[float]:
    """The vector of a prompt before it has length 1."""
    return [float(value) - 100 for value in hashlib.sha256(prompt).digest()[:8]]


class FakeGenerator:
    """Answers with `answer` over and over, a byte a token, until max_tokens; once only, where it `stops`. Choices take turns."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.answer = ANSWER
        self.stops = False
        self.embedding_requests: list[EmbeddingRequest] = []
        self.open = 0  # generators and embeddings that run now
        self.most_open = 0  # embeddings
        self.error: Exception | None = None
        self.error_after = 0  # deltas
        self.pause: asyncio.Event | None = None  # waited for before each delta after the first
        self.cached_tokens = 0
        self.delay: dict[int, float] = {}  # seconds before the first delta, by length of the prompt

    async def generate(self, request: GenerationRequest) -> AsyncIterator[ChoiceDelta]:
        self.requests.append(request)
        self.open += 1
        try:
            await asyncio.sleep(self.delay.get(len(request.prompt_token_ids), 0))
            count = 0
            async for delta in self._deltas(request):
                if self.error is not None and count == self.error_after:
                    raise self.error
                count += 1
                yield delta
                await (self.pause.wait() if self.pause is not None else asyncio.sleep(0))
        finally:
            self.open -= 1

    async def embed(self, request: EmbeddingRequest) -> Embedding:
        self.embedding_requests.append(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.delay.get(len(request.prompt_token_ids), 0))
            if self.error is not None:
                raise self.error
            vector = np.array(state_of(bytes(request.prompt_token_ids)), dtype="<f4")
            return Embedding(vector=vector, cached_tokens=self.cached_tokens)
        finally:
            self.open -= 1

    async def _deltas(self, request: GenerationRequest) -> AsyncIterator[ChoiceDelta]:
        params = request.params
        total = params.max_tokens or 0
        answer = self.answer.encode()
        data = (answer * (1 if self.stops else total // len(answer) + 1))[:total]
        reason = "stop" if self.stops and len(data) < total else "length"
        total = len(data)
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(params.n)]
        scores = None
        if params.prompt_logprobs is not None:
            scores = tuple(score(token_id, params.prompt_logprobs) for token_id in request.prompt_token_ids[1:])
        for position in range(max(1, total)):
            for index in range(params.n):
                token = data[position : position + 1]
                last = position + 1 >= total
                yield ChoiceDelta(
                    index=index,
                    text=decoders[index].decode(token, final=last),
                    token_ids=tuple(token),
                    logprobs=None if params.logprobs is None else tuple(score(token_id, params.logprobs) for token_id in token),
                    # the choices after the first must wait for these: they come last in the first round
                    prompt_logprobs=scores if position == 0 and index == 0 else None,
                    cached_tokens=self.cached_tokens if position == 0 else None,
                    finish_reason=reason if last else None,
                )


def load(tokenizer: Tokenizer, generator: FakeGenerator, *, context: int = CONTEXT) -> LoadedModel:
    info = EngineInfo(
        model="fake",
        max_model_len=context,
        vocab_size=300,  # more than the tokenizer has
        embedding_size=8,
        num_blocks=64,
        block_size=16,
        dtype="float32",
        device="none",
        threads=1,
        path="fake",
        kv_cache_dtype="float32",
        kv_bytes=0,
        weight_bytes=0,
        load_seconds=0.0,
    )
    template = ChatTemplate(tokenizer.chat_template, tokenizer)
    return LoadedModel(info=info, tokenizer=tokenizer, template=template, generator=generator, token_texts=TokenTexts(tokenizer))


class World:
    """A service around the fakes, and a client of it."""

    def __init__(self, tokenizer: Tokenizer, **config: object) -> None:
        self.engine = FakeEngine()
        self.generator = FakeGenerator()
        folder = config.pop("batch_folder", None)
        self.max_requests = int(str(config.pop("max_requests", 64)))
        tracing = config.pop("tracing", None)
        self.service = Service(
            config=ServerConfig(**config),  # type: ignore[arg-type]
            engine=self.engine,
            model_names=("tiny", "other/name"),
            max_requests=self.max_requests,
            tracing=tracing,  # type: ignore[arg-type]
        )
        self.tokenizer = tokenizer
        self.service.loaded = load(tokenizer, self.generator)
        self.batches = None if folder is None else BatchService(self.service, Path(str(folder)), max_lines=4)
        self.app = create_app(self.service, self.batches)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://test")

    def with_context(self, context: int) -> LoadedModel:
        """The model with another context length."""
        return load(self.tokenizer, self.generator, context=context)

    async def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return await self.http.post(path, json=body, **options)  # type: ignore[arg-type]

    async def complete(self, **body: object) -> httpx.Response:
        return await self.post("/v1/completions", body)

    async def chat(self, content: object = "Hi", **body: object) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **body})

    async def close(self) -> None:
        await self.http.aclose()
        if self.batches is not None:
            await self.batches.close()
        self.service.close()


def refused(response: httpx.Response, status: int = 400, *, param: str | None = None, code: str | None = None) -> dict[str, str | None]:
    """The error of a response that must be one, in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert param is None or error["param"] == param, error
    assert code is None or error["code"] == code, error
    return error


def events(text: str) -> list[object]:
    """The data of server-sent events; [DONE] as text."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return ["[DONE]" if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def write_model(directory: Path, **script: object) -> Path:
    """A directory that `make_runner` and the server take as a model."""
    write_byte_tokenizer(directory)
    (directory / "script.json").write_text(json.dumps(script))
    return directory


def make_runner(config: EngineConfig) -> FakeRunner:
    """The --runner-factory for such a directory."""
    return FakeRunner(config, FakeScript.parse((Path(config.model) / "script.json").read_text()))
