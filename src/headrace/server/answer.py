"""The answer to one request: engine requests out, pieces of the choices back. Streams and whole bodies are made from the same pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.core.messages import TokenLogprobs
from headrace.engine.generation import ChoiceDelta, GenerationRequest
from headrace.engine.timeline import Watcher
from headrace.errors import EngineUnavailable, QueueFull, RequestError
from headrace.observe.metrics import RequestMetrics
from headrace.server.fan_in import FanIn
from headrace.server.logprobs import prompt_entries
from headrace.server.parse import ParsedRequest, Prompt
from headrace.server.rate_limits import Charge
from headrace.server.service import LoadedModel
from headrace.text.answer_events import AnswerParser, ContentText, Event
from headrace.text.reasoning import ReasoningCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is the same in all parts of an answer."""

    answer_id: str
    created: int  # Unix seconds
    model: str


@dataclass(slots=True, kw_only=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # of the completion; None: the model does not reason

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return body


@dataclass(slots=True, kw_only=True)
class Piece:
    """What is new of one choice. All pieces of a choice, joined, are its whole."""

    index: int  # of the choice in the answer
    opens: bool  # the first piece of the choice
    text: str  # raw, as the model wrote it
    events: list[Event] = field(default_factory=list)  # what a parser made of the text, where the prompt has one
    logprobs: Any = None  # in the form of the route, see `Scorer`
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None  # on the first piece, where asked for
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # on the first piece, where asked for
    finish_reason: str | None = None  # on the last piece; "tool_calls" for a stop after calls
    stop_reason: int | str | None = None


# Makes the logprobs of a choice's pieces: (scores of new tokens, scores of the prompt or None after the first piece) -> form of the route
Scorer = Callable[[tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...] | None], Any]


@dataclass(slots=True, kw_only=True)
class _Choice:
    """What is kept of a choice between its deltas."""

    scorer: Scorer | None
    parser: AnswerParser | None
    counter: ReasoningCounter | None
    opened: bool = False
    finish_reason: str | None = None  # that of its last piece
    num_tokens: int = 0
    last_token: float = 0.0  # monotonic seconds


@dataclass(slots=True, kw_only=True)
class _PromptState:
    prompt: Prompt
    choices: list[_Choice]
    counted: bool = False  # the prompt's tokens are in the usage metrics
    scores: tuple[TokenLogprobs, ...] | None = None  # of the prompt; they come with choice 0
    scores_due: bool = False  # no choice can begin before they are there
    held: list[ChoiceDelta] = field(default_factory=list)


def translated(error: RequestError, prompt_field: str) -> RequestError:
    """The engine's error as HTTP has it."""
    if error.param == "prompt":
        error.param = prompt_field  # the engine does not know what the body calls it
    if error.code == "deadline_exceeded":  # the server is too busy for this client, but nothing is broken
        late = QueueFull(error.message)
        late.code = error.code
        return late
    return error


class Answer:
    """Runs a parsed request. `batches()` may be iterated once; `usage` grows with it."""

    def __init__(
        self,
        request: ParsedRequest,
        model: LoadedModel,
        metrics: RequestMetrics,
        *,
        answer_id: str,
        tenant: str,
        arrival: float,
        new_scorer: Callable[[Prompt], Scorer] | None,
        background: bool = False,
        charge: Charge | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in request.prompts))
        self._request = request
        self._model = model
        self._metrics = metrics
        self._background = background
        self._charge = charge  # settled at the end
        self.answer_id = answer_id
        self.first_token_at: float | None = None  # monotonic seconds
        self.error: str | None = None  # the code of a failure that is the server's
        self._watcher = watcher
        self._tenant = tenant
        self._arrival = arrival
        self._prompts = [
            _PromptState(
                prompt=prompt,
                choices=[
                    _Choice(
                        scorer=None if new_scorer is None else new_scorer(prompt),
                        parser=None if prompt.new_parser is None else prompt.new_parser(),
                        counter=None if prompt.new_counter is None else prompt.new_counter(),
                    )
                    for _ in range(request.n)
                ],
                scores_due=prompt.params.prompt_logprobs is not None and len(prompt.token_ids) > 1,
            )
            for prompt in request.prompts
        ]

    @property
    def finish_reasons(self) -> list[str | None]:
        """Of all choices, in their order; None: not ended yet."""
        return [choice.finish_reason for state in self._prompts for choice in state.choices]

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        """Pieces as they become ready. Raises `RequestError`. Closing the iterator aborts what still runs."""
        streams = [self._model.generator.generate(self._generation_request(index)) for index in range(len(self._prompts))]
        unfinished = "abort"  # where the consumer leaves or is cancelled
        try:
            async with FanIn(streams, gather=len(self._prompts) * self._request.n > 1) as batches:
                async for batch in batches:
                    now = time.monotonic()
                    pieces = [piece for index, delta in batch for piece in self._take(index, delta, now)]
                    if pieces:
                        yield pieces
        except RequestError as error:
            shown = translated(error, self._request.prompt_field)
            started = any(choice.opened for state in self._prompts for choice in state.choices)
            unfinished = "error" if started or shown.status >= 500 else ""
            self.error = shown.code if unfinished else None
            raise shown from error
        except Exception:
            self.error = unfinished = "error"
            raise
        finally:
            if unfinished:
                self._count_unfinished(unfinished)
            if self._charge is not None:
                self._charge.settle(self.usage.prompt_tokens + self.usage.completion_tokens if unfinished else 0)

    def _generation_request(self, index: int) -> GenerationRequest:
        request, prompt = self._request, self._prompts[index].prompt
        return GenerationRequest(
            request_id=f"{self.answer_id}-p{index}",
            prompt_token_ids=prompt.token_ids,
            params=prompt.params,
            priority=request.priority,
            deadline=None if request.deadline_ms is None else self._arrival + request.deadline_ms / 1000,
            tenant=self._tenant,
            cache_salt=request.cache_salt,
            session_id=request.session_id,
            background=self._background,
            watcher=self._watcher,
        )

    def _take(self, index: int, delta: ChoiceDelta, now: float) -> list[Piece]:
        state = self._prompts[index]
        self._count(state, delta, now)
        if delta.finish_reason in ("abort", "error"):
            raise EngineUnavailable("The server ended this request before it was complete.")
        if not state.scores_due:
            return [self._piece(index, delta)]
        state.held.append(delta)
        if delta.prompt_logprobs is None:
            return []
        state.scores, state.scores_due = delta.prompt_logprobs, False
        held, state.held = state.held, []
        return [self._piece(index, item) for item in held]

    def _piece(self, index: int, delta: ChoiceDelta) -> Piece:
        request, state = self._request, self._prompts[index]
        choice = state.choices[delta.index]
        piece = Piece(
            index=index * request.n + delta.index,
            opens=not choice.opened,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if request.return_token_ids:
            piece.token_ids = delta.token_ids
        if choice.parser is not None:
            piece.events = choice.parser.push(delta.text)
            if delta.finish_reason is not None:
                piece.events += choice.parser.finish()
            if delta.finish_reason == "stop" and choice.parser.called:
                piece.finish_reason = choice.finish_reason = "tool_calls"
        if choice.scorer is not None:
            piece.logprobs = choice.scorer(delta.logprobs or (), None if choice.opened else state.scores or ())
        if not choice.opened:
            if state.prompt.echo_text:  # said before; whatever stands in it is no call of this answer
                piece.text = state.prompt.echo_text + piece.text
                piece.events.insert(0, ContentText(text=state.prompt.echo_text))
            if request.return_token_ids:
                piece.prompt_token_ids = state.prompt.token_ids
            if request.prompt_logprobs is not None:
                piece.prompt_logprobs = prompt_entries(state.scores or (), len(state.prompt.token_ids), self._model.token_texts)
            choice.opened = True
        return piece

    def _count(self, state: _PromptState, delta: ChoiceDelta, now: float) -> None:
        choice = state.choices[delta.index]
        count = len(delta.token_ids)
        if delta.cached_tokens is not None and delta.index == 0:
            self.usage.cached_tokens += delta.cached_tokens
        self.usage.completion_tokens += count
        if choice.counter is not None:
            before = choice.counter.count
            choice.counter.push(delta.token_ids)
            self.usage.reasoning_tokens = (self.usage.reasoning_tokens or 0) + choice.counter.count - before
        if not state.counted:
            state.counted = True
            self._metrics.prompt(len(state.prompt.token_ids))
        if count:
            if self.first_token_at is None:
                self.first_token_at = now
            if choice.num_tokens == 0:
                self._metrics.first_token(now - self._arrival)
                if count > 1:
                    self._metrics.more_tokens(0.0, count - 1)
            else:
                self._metrics.more_tokens(now - choice.last_token, count)
            choice.num_tokens += count
            choice.last_token = now
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            self._metrics.finished(delta.finish_reason, now - self._arrival, choice.num_tokens)

    def _count_unfinished(self, reason: str) -> None:
        now = time.monotonic()
        for state in self._prompts:
            for choice in state.choices:
                if choice.finish_reason is None:
                    self._metrics.finished(reason, now - self._arrival, choice.num_tokens)
