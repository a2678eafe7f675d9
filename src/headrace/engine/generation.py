"""From a prompt of tokens to a stream of text: n choices, stop strings, and everything given back on every way out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator

from headrace.core.messages import AddRequest, TokenOutput
from headrace.engine.choice import Choice, ChoiceDelta
from headrace.engine.client import EngineClient
from headrace.engine.embedding import Embedding, EmbeddingRequest, embed
from headrace.engine.engine_requests import GenerationRequest, engine_requests
from headrace.engine.timeline import Watcher
from headrace.text.grammar_checker import GrammarChecker
from headrace.text.tokenizer import Tokenizer

__all__ = ["ChoiceDelta", "GenerationRequest", "Generator"]


class Generator:
    """Runs requests on one engine."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._grammars = GrammarChecker(tokenizer)

    def close(self) -> None:
        """Ends the process that checks grammars, where there is one."""
        self._grammars.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """Yields deltas as they come, of all choices in turn; each choice ends with one that has a `finish_reason`.

        Deltas that the consumer does not take in time are merged. Leaving the iterator early (close it: `contextlib.aclosing`) aborts
        every choice. Raises `InvalidRequest` before the first delta, and any `RequestError` of the engine.
        """
        info = self._client.info
        if info is None:
            raise self._client.unavailable()
        adds = engine_requests(request, info, self._tokenizer)
        params = request.params
        if params.structured is not None:
            if self._client.state != "ready":
                raise self._client.unavailable()
            await self._grammars.check(params.structured)
            self._client.teach(self._grammars.vocabulary)
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            for index in range(params.n):
                yield ChoiceDelta(index=index, cached_tokens=0, finish_reason="length")
            return
        limit = 0 if params.max_tokens == 0 else 1
        run = _Run(self._client, request.watcher)
        try:
            for index, add in enumerate(adds):
                run.open(add, Choice(index, params, self._tokenizer, limit=limit))
            while (delta := await run.next_delta()) is not None:
                yield delta
        finally:
            run.close()

    async def embed(self, request: EmbeddingRequest) -> Embedding:
        """The vector of a prompt. Raises any `RequestError`; cancelling it ends the engine's part too."""
        return await embed(self._client, request)


class _Run:
    """The open choices of one request and the deltas that wait for the consumer; the client's `Sink` for each of them."""

    def __init__(self, client: EngineClient, watcher: Watcher | None) -> None:
        self._client = client
        self._watcher = watcher
        self._unfinished: dict[str, Choice] = {}  # by engine request id
        self._ready: deque[Choice] = deque()  # each at most once
        self._error: Exception | None = None
        self._woken: asyncio.Future[None] | None = None  # the consumer waits for it

    def open(self, add: AddRequest, choice: Choice) -> None:
        self._client.open(add, self, self._watcher)
        self._unfinished[add.request_id] = choice

    def close(self) -> None:
        """Aborts what has not ended."""
        for request_id in self._unfinished:
            self._client.abort(request_id)
        self._unfinished.clear()

    async def next_delta(self) -> ChoiceDelta | None:
        """None when every choice has ended."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return None
            self._woken = asyncio.get_running_loop().create_future()
            try:
                await self._woken
            finally:
                self._woken = None
        return self._ready.popleft().take()

    def push(self, output: TokenOutput) -> None:
        request_id = output.request_id
        choice = self._unfinished.get(request_id)
        if choice is None:
            return  # closed in the meantime
        begin = 0.0 if self._watcher is None else time.monotonic()
        try:
            stopped = choice.push(output)
        except Exception as error:  # a fault in our text code: it belongs to this request's consumer, not to the client's read loop
            self.fail(error)
            return
        if self._watcher is not None:
            self._watcher.detokenised(begin, time.monotonic())
        if stopped:
            self._client.abort(request_id, reason="stop")
        if choice.finished:
            del self._unfinished[request_id]
        if choice not in self._ready:
            self._ready.append(choice)
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def fail(self, error: Exception) -> None:
        """The consumer gets the error after what is ready, and closes the run, which aborts what still runs."""
        self._error = self._error or error
        self._wake()
