"""Between the socket and the engine's inbox: requests with a grammar wait here, not in the loop, until it is compiled.

Grammars are compiled one after the other in a thread. A request goes on into the inbox with its grammar, which is held until the request has
ended; those of the latest requests are kept beyond that, for others with the same one.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.messages import AddRequest, TokenOutput
from headrace.engine.wire import Abort, Add, Explain, FromEngine, Outputs, Shutdown, Vocabulary
from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar_bounds import STACK_BYTES

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 32


class GrammarGate:
    """Everything for the engine goes through `put`, everything from it through `emit`. Any thread may call any method.

    `post` leaves a message for the engine's loop, `send` one for the client. It is the runner's `GrammarSource`.
    """

    def __init__(self, post: Callable[[Add | Abort | Shutdown | Explain], None], send: Callable[[FromEngine], None]) -> None:
        self._post = post
        self._send = send
        self._lock = threading.Lock()
        self._waiting: dict[str, bool] = {}  # ids of requests whose grammar is not compiled yet; False: aborted meanwhile
        self._held: dict[str, LLMatcher] = {}  # by request id; at the start of the answer
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._work: queue.SimpleQueue[Vocabulary | AddRequest] = queue.SimpleQueue()
        self._tokenizer: LLTokenizer | None = None
        self._started = False

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return () if self._tokenizer is None else tuple(self._tokenizer.eos_tokens)

    @property
    def num_tokens(self) -> int:
        return 0 if self._tokenizer is None else self._tokenizer.vocab_size

    def put(self, message: Add | Abort | Shutdown | Explain | Vocabulary) -> None:
        match message:
            case Vocabulary():
                self._later(message)
            case Add(request) if request.params.structured is not None:
                with self._lock:
                    self._waiting[request.request_id] = True
                self._later(request)
            case Abort(abort) if self._give_up(abort.request_id):
                self._send(Outputs((TokenOutput(request_id=abort.request_id, finish_reason=abort.reason),)))
            case _:
                self._post(message)

    def emit(self, message: FromEngine) -> None:
        """Sends it, and lets go of the grammars of requests that end with it."""
        if isinstance(message, Outputs):
            for output in message.outputs:
                if output.finish_reason is not None:
                    self._held.pop(output.request_id, None)
        self._send(message)

    def new_matcher(self, request_id: str) -> LLMatcher | None:
        matcher = self._held.get(request_id)
        return None if matcher is None else matcher.deep_copy()

    def _give_up(self, request_id: str) -> bool:
        """Whether the request was waiting here; it does not go on then."""
        with self._lock:
            if not self._waiting.get(request_id):
                return False
            self._waiting[request_id] = False
            return True

    def _later(self, item: Vocabulary | AddRequest) -> None:
        self._work.put(item)
        if not self._started:
            self._started = True
            earlier = threading.stack_size(STACK_BYTES)
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
            threading.stack_size(earlier)

    def _run(self) -> None:
        while True:
            item = self._work.get()
            if isinstance(item, Vocabulary):
                self._tokenizer = item.vocabulary.library_tokenizer()
            else:
                self._admit(item)

    def _admit(self, request: AddRequest) -> None:
        refused: TokenOutput | None = None
        assert request.params.structured is not None
        try:
            if self._waiting[request.request_id]:
                self._held[request.request_id] = self._compiled(request.params.structured)
        except InvalidRequest as error:
            refused = TokenOutput(request_id=request.request_id, finish_reason="error", error_code="invalid_value", error_message=error.message)
        except Exception as error:  # whatever it is, it concerns this request alone
            text = f"The grammar could not be compiled: {type(error).__name__}: {error}"
            refused = TokenOutput(request_id=request.request_id, finish_reason="error", error_code="request_failed", error_message=text)
        with self._lock:
            wanted = self._waiting.pop(request.request_id)
        if not wanted:
            self._held.pop(request.request_id, None)
        elif refused is None:
            self._post(Add(request))
        else:
            self._send(Outputs((refused,)))

    def _compiled(self, structured: StructuredOutputs) -> LLMatcher:
        from headrace.text.grammar_compiler import compile_matcher  # with the library: an engine that is never asked for a form does not hold it

        key = (structured.kind, structured.source)
        matcher = self._kept.pop(key, None)
        if matcher is None:
            assert self._tokenizer is not None, "the vocabulary comes first"
            matcher = compile_matcher(structured, self._tokenizer)
        self._kept[key] = matcher
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return matcher
