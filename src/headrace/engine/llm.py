"""Offline inference: `LLM(...).generate(prompts)`, `.chat(messages)` and `.embed(prompts)`, on the same engine that serves."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, get_args

from tqdm import tqdm

from headrace.config import EngineInfo
from headrace.core.messages import Pooling
from headrace.engine.async_llm import AsyncLLM, Message
from headrace.engine.outputs import EmbeddingRequestOutput, RequestOutput
from headrace.engine.prompts import ParsedPrompt, Prompt, is_single_prompt, parse_prompt
from headrace.errors import EngineUnavailable, InvalidRequest
from headrace.sampling_params import SamplingParams
from headrace.text.tokenizer import Tokenizer

__all__ = ["LLM", "AsyncLLM"]

T = TypeVar("T")


class LLM:
    """A model on an engine process of its own; blocks until the model is loaded. Close it, or use it in a `with`.

    `model`: None or "default", a local directory or GGUF file, or a hub name. Options are the fields of `EngineConfig` (dtype,
    quantization, max_model_len, max_num_seqs, ...). `tokenizer`: a model path to take the tokenizer from, or a `Tokenizer`.
    Methods may be called from several threads. Raises `StartError` where the model cannot be served.
    """

    def __init__(self, model: str | Path | None = None, *, tokenizer: str | Path | Tokenizer | None = None, **options: Any) -> None:
        self._engine = AsyncLLM(model, tokenizer=tokenizer, **options)
        self._loop = asyncio.new_event_loop()
        # The engine dies with the thread that started it, so this one lives as long as the engine.
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace LLM", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _shut_down, self._engine, self._loop, self._thread)  # also at the interpreter's exit
        try:
            self.info: EngineInfo = self._run(self._engine.start())
        except BaseException:
            self.close()
            raise
        # So many of our requests may be open that none can find the queue full.
        self._window_size = max(1, self._engine.config.max_num_queued_reqs)
        self._window = asyncio.Semaphore(self._window_size)
        self._window_turn = asyncio.Lock()  # one request gathers its permits at a time: two halves would wait for each other

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order, however many there are.

        A prompt is a text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`; a single one may stand without a list. `sampling_params` and
        `priority` are for all prompts, or one per prompt. Raises the first `RequestError`; all other requests are aborted then.
        """
        many: Sequence[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        parsed = [parse_prompt(prompt, self.tokenizer) for prompt in many]
        return self._run(self._generate_all(parsed, sampling_params, priority, use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output per conversation, in order; `messages` is one conversation or a list of them. Otherwise like `generate`."""
        conversations: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        parsed = [
            self._engine.render_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(self._generate_all(parsed, sampling_params, None, use_tqdm))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling: Pooling = "last",
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector of length 1 per prompt, in order: the hidden state of its last token, or the mean of all.

        `dimensions` keeps the leading numbers, `truncate_prompt_tokens` the last tokens of each prompt. Otherwise like `generate`.
        """
        if pooling not in get_args(Pooling):
            raise InvalidRequest(f"pooling must be one of {', '.join(get_args(Pooling))}, not {pooling!r}.", param="pooling")
        if truncate_prompt_tokens is not None and truncate_prompt_tokens < 1:
            raise InvalidRequest(f"truncate_prompt_tokens must be at least 1, not {truncate_prompt_tokens}.", param="truncate_prompt_tokens")
        many: Sequence[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        parsed = [parse_prompt(prompt, self.tokenizer) for prompt in many]
        if truncate_prompt_tokens is not None:
            parsed = [replace(prompt, token_ids=prompt.token_ids[-truncate_prompt_tokens:]) for prompt in parsed]
        return self._run(self._embed_all(parsed, pooling, dimensions, use_tqdm))

    def close(self) -> None:
        """Ends the engine process. May be called again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the engine's loop; an interrupt here cancels it there."""
        if not self._end.alive:
            work.close()
            raise EngineUnavailable("This LLM has been closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _generate_all(
        self,
        prompts: Sequence[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", sampling_params or SamplingParams(), SamplingParams, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, int, len(prompts))
        with _Progress(len(prompts), disable=not use_tqdm) as progress:
            work = [self._generate_one(prompt, each, rank, progress) for prompt, each, rank in zip(prompts, params, priorities, strict=True)]
            return await _all_of(work)

    async def _embed_all(
        self, prompts: Sequence[ParsedPrompt], pooling: Pooling, dimensions: int | None, use_tqdm: bool
    ) -> list[EmbeddingRequestOutput]:
        with _Progress(len(prompts), disable=not use_tqdm) as progress:

            async def one(prompt: ParsedPrompt) -> EmbeddingRequestOutput:
                async with self._window:
                    output = await self._engine.embed_parsed(prompt, pooling=pooling, dimensions=dimensions)
                progress.add(len(output.prompt_token_ids), 0)
                return output

            return await _all_of([one(prompt) for prompt in prompts])

    async def _generate_one(self, prompt: ParsedPrompt, params: SamplingParams, priority: int, progress: _Progress) -> RequestOutput:
        taken = 0
        try:
            async with self._window_turn:
                while taken < min(params.n, self._window_size):
                    await self._window.acquire()
                    taken += 1
            async with aclosing(self._engine.generate_parsed(prompt, params, priority=priority)) as outputs:
                async for each in outputs:
                    output = each
        finally:
            for _ in range(taken):
                self._window.release()
        progress.add(len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs))
        return output


def _shut_down(engine: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Ends the engine, its loop and its thread."""
    closing = asyncio.run_coroutine_threadsafe(engine.close(), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:  # the garbage collector runs where it likes
        closing.result()
        thread.join()
        loop.close()


async def _all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. Raises the first error; all others are cancelled then."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class _Progress:
    """The progress bar: finished prompts, and tokens per second so far."""

    def __init__(self, total: int, *, disable: bool) -> None:
        self._bar = tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True, disable=disable)
        self._begin = time.monotonic()
        self._prompt_tokens = 0
        self._output_tokens = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        seconds = max(time.monotonic() - self._begin, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._prompt_tokens / seconds:.1f} tok/s, output: {self._output_tokens / seconds:.1f} tok/s", refresh=False
        )
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()


def _one_each(name: str, value: Any, kind: type[T], count: int) -> list[T]:
    """One value per prompt, from a single one or a sequence of them. Raises `InvalidRequest`."""
    values = [value] * count if isinstance(value, kind) else list(value)
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} entries for {count} prompts; give one for all, or one per prompt.", param=name)
    for entry in values:
        if not isinstance(entry, kind):
            raise InvalidRequest(f"{name} must hold {kind.__name__}, not {type(entry).__name__}.", param=name)
    return values
