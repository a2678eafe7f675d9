"""The engine for asyncio programs: a model, its tokenizer and an engine process in one object."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.config import EngineConfig, EngineInfo, SpeculativeConfig
from headrace.core.messages import Pooling
from headrace.engine.client import EngineClient
from headrace.engine.embedding import EmbeddingRequest, unit_vector
from headrace.engine.generation import GenerationRequest, Generator
from headrace.engine.outputs import EmbeddingOutput, EmbeddingRequestOutput, OutputBuilder, RequestOutput
from headrace.engine.prompts import ParsedPrompt, Prompt, parse_prompt
from headrace.errors import ConfigError, InvalidRequest
from headrace.sampling_params import SamplingParams
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

Message = Mapping[str, Any]  # role, content, and what else the chat template knows


def make_engine_config(model: str | Path | None, options: Mapping[str, Any]) -> EngineConfig:
    """The config of a model given as None or "default", a path or a hub name. Raises `ConfigError` for an unknown option."""
    known = {entry.name for entry in fields(EngineConfig)} - {"model"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"Unknown option {', '.join(unknown)}. Known options: {', '.join(sorted(known))}.")
    if isinstance(speculative := options.get("speculative_config"), Mapping):
        options = {**options, "speculative_config": SpeculativeConfig.parse(speculative)}
    if options.get("runner_factory") is not None:
        return EngineConfig(model=str(model), **options)  # another runner gives the name its own meaning
    from headrace.models.store import resolve_model

    return EngineConfig(model=str(resolve_model(None if model in (None, "default") else str(model))), **options)


class AsyncLLM:
    """A model on an engine process of its own. Use as `async with AsyncLLM() as llm`, or call `start()` and `close()`.

    `model`: None or "default", a local directory or GGUF file, or a hub name. Options are the fields of `EngineConfig`.
    `tokenizer`: a model path to take the tokenizer from, or a `Tokenizer`; by default the model's own.
    """

    def __init__(
        self, model: str | Path | None = None, *, tokenizer: str | Path | Tokenizer | None = None, max_restarts: int = 5, **options: Any
    ) -> None:
        self.config = make_engine_config(model, options)
        self.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(Path(tokenizer or self.config.model))
        self.client = EngineClient(self.config, max_restarts=max_restarts)
        self._generator = Generator(self.client, self.tokenizer)
        self._ids = itertools.count()

    async def start(self) -> EngineInfo:
        """Loads the model. Raises `StartError`."""
        return await self.client.start()

    async def close(self) -> None:
        """Ends the engine process; open requests fail."""
        self._generator.close()
        await self.client.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's output each time it has grown (the same object), the last time with `finished`.

        Raises `RequestError`. Leaving the iterator early aborts the request.
        """
        parsed = await asyncio.to_thread(parse_prompt, prompt, self.tokenizer)
        async with aclosing(self.generate_parsed(parsed, sampling_params, request_id, priority=priority)) as outputs:
            async for output in outputs:
                yield output

    async def generate_parsed(
        self, prompt: ParsedPrompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a prompt that is tokenised already."""
        params = sampling_params or SamplingParams()
        name = request_id or f"request-{next(self._ids)}"
        builder = OutputBuilder(name, prompt.text, prompt.token_ids, params.n, self.tokenizer)
        request = GenerationRequest(request_id=name, prompt_token_ids=prompt.token_ids, params=params, priority=priority)
        async with aclosing(self._generator.generate(request)) as deltas:
            async for delta in deltas:
                builder.add(delta)
                yield builder.output

    async def embed_parsed(
        self, prompt: ParsedPrompt, *, pooling: Pooling = "last", dimensions: int | None = None, priority: int = 0
    ) -> EmbeddingRequestOutput:
        """The vector of a prompt that is tokenised already, of length 1. Raises `RequestError`."""
        if dimensions is not None and self.client.info is not None and not 1 <= dimensions <= self.client.info.embedding_size:
            raise InvalidRequest(f"dimensions must be from 1 to {self.client.info.embedding_size}, not {dimensions}.", param="dimensions")
        name = f"request-{next(self._ids)}"
        request = EmbeddingRequest(request_id=name, prompt_token_ids=prompt.token_ids, pooling=pooling, priority=priority)
        embedding = await self._generator.embed(request)
        return EmbeddingRequestOutput(
            request_id=name,
            prompt_token_ids=list(prompt.token_ids),
            outputs=EmbeddingOutput(embedding=unit_vector(embedding.vector, dimensions).tolist()),
            num_cached_tokens=embedding.cached_tokens,
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ParsedPrompt:
        """A conversation as a prompt. `chat_template` replaces the model's own. Raises `InvalidRequest`."""
        source = chat_template or self.tokenizer.chat_template
        if source is None:
            raise InvalidRequest("The model has no chat template; give one as chat_template.", param="chat_template")
        template = ChatTemplate(source, self.tokenizer)
        options: dict[str, Any] = {
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "kwargs": dict(chat_template_kwargs or {}),
        }
        conversation = [dict(message) for message in messages]
        return ParsedPrompt(text=template.render(conversation, **options), token_ids=tuple(template.render_ids(conversation, **options)))
