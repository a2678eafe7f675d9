"""The outputs of one request as an async iterator that never makes the engine wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import chain

from headrace.core.messages import TokenOutput
from headrace.errors import RequestError


def merge_outputs(outputs: list[TokenOutput]) -> TokenOutput:
    """Successive outputs of one request (at least one) as one."""
    if len(outputs) == 1:
        return outputs[0]
    scored = [output.logprobs for output in outputs if output.logprobs is not None]
    return replace(
        outputs[-1],
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=tuple(chain.from_iterable(scored)) if scored else None,
        prompt_logprobs=next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None),
        cached_tokens=next((output.cached_tokens for output in outputs if output.cached_tokens is not None), None),
    )


class RequestStream(AsyncIterator[TokenOutput]):
    """Iterator over a request's outputs; ends after the one with a `finish_reason`, or raises the `RequestError` that ended the request.

    Outputs that wait for the consumer are merged. `aclose()`, or a cancelled `__anext__`, before the end aborts the request.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._pending: list[TokenOutput] = []
        self._error: RequestError | None = None
        self._ended = False  # the last output or the error has arrived, or the stream was closed
        self._arrived = asyncio.Event()

    def push(self, output: TokenOutput) -> None:
        self._pending.append(output)
        self._ended = output.finish_reason is not None
        self._arrived.set()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._ended = True
        self._arrived.set()

    async def __anext__(self) -> TokenOutput:
        while not self._pending:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            try:
                await self._arrived.wait()
            except BaseException:
                await self.aclose()
                raise
        pending, self._pending = self._pending, []
        return merge_outputs(pending)

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._abort()
        self._pending.clear()
