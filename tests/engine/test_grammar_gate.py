"""Requests with a grammar wait beside the engine's loop until it is compiled, and the grammar is held until they end."""

from __future__ import annotations

import threading

import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace.core.messages import AbortRequest, AddRequest, TokenOutput
from headrace.engine import grammar_gate
from headrace.engine.grammar_gate import GrammarGate
from headrace.engine.wire import Abort, Add, FromEngine, Outputs, Shutdown, Vocabulary
from headrace.sampling_params import SamplingParams, StructuredOutputs
from headrace.text import grammar_compiler
from headrace.text.grammar_vocabulary import GrammarVocabulary
from headrace.text.tokenizer import Tokenizer
from tests.patience import LIMIT_S, until


class Bench:
    """A gate between two lists."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.posted: list[object] = []
        self.sent: list[FromEngine] = []
        self.gate = GrammarGate(self.posted.append, self.sent.append)
        self.vocabulary = GrammarVocabulary.of(tokenizer)

    def add(self, request_id: str, source: str | None) -> Add:
        structured = None if source is None else StructuredOutputs(kind="regex", source=source)
        request = AddRequest(
            request_id=request_id, prompt_token_ids=(1,), params=SamplingParams(structured=structured), arrival=0.0, eos_token_ids=(257,)
        )
        message = Add(request)
        self.gate.put(message)
        return message

    @property
    def ended(self) -> list[TokenOutput]:
        return [output for message in self.sent if isinstance(message, Outputs) for output in message.outputs]


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def end(request_id: str) -> Outputs:
    return Outputs((TokenOutput(request_id=request_id, finish_reason="stop"),))


def test_a_request_goes_on_with_its_grammar_and_others_do_not_wait(bench: Bench) -> None:
    bench.gate.put(Vocabulary(bench.vocabulary))
    held = bench.add("a", "[0-9]+")
    free = bench.add("b", None)
    assert free in bench.posted
    until(lambda: held in bench.posted)
    assert bench.gate.num_tokens == len(bench.vocabulary.tokens)
    assert bench.gate.end_token_ids == bench.vocabulary.end_token_ids
    first, second = bench.gate.new_matcher("a"), bench.gate.new_matcher("a")
    assert first is not None
    assert second is not None
    assert first.consume_token(ord("1"))
    assert not second.is_accepting()  # each has a state of its own
    assert bench.gate.new_matcher("b") is None
    bench.gate.put(Shutdown())
    assert bench.posted[-1] == Shutdown()


def test_grammars_are_let_go_with_their_requests_but_the_latest_are_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_matcher(structured: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
        compiled.append(structured.source)
        return original(structured, tokenizer)

    original = grammar_compiler.compile_matcher
    monkeypatch.setattr(grammar_compiler, "compile_matcher", compile_matcher)
    monkeypatch.setattr(grammar_gate, "MAX_KEPT", 2)
    bench.gate.put(Vocabulary(bench.vocabulary))
    for number, source in enumerate(["a", "b", "a", "c", "d", "a", "b"]):
        bench.add(str(number), source)
    until(lambda: len(bench.posted) == 7)
    assert compiled == ["a", "b", "c", "d", "a", "b"]
    assert bench.gate.new_matcher("0") is not None
    bench.gate.emit(Outputs((TokenOutput(request_id="0", token_ids=(1,)),)))
    assert bench.gate.new_matcher("0") is not None
    bench.gate.emit(end("0"))
    assert bench.gate.new_matcher("0") is None
    assert bench.gate.new_matcher("2") is not None
    assert len(bench.sent) == 2


def test_what_cannot_be_compiled_is_refused_alone(bench: Bench) -> None:
    bench.gate.put(Vocabulary(bench.vocabulary))
    bench.add("bad", "[0-")
    good = bench.add("good", "[0-9]")
    until(lambda: good in bench.posted)
    (refused,) = bench.ended
    assert (refused.request_id, refused.finish_reason, refused.error_code) == ("bad", "error", "invalid_value")
    assert "unclosed" in (refused.error_message or "")


def test_a_fault_in_the_library_fails_the_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(structured: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
        raise RuntimeError("no")

    monkeypatch.setattr(grammar_compiler, "compile_matcher", broken)
    bench.gate.put(Vocabulary(bench.vocabulary))
    bench.add("a", "x")
    until(lambda: bench.ended)
    assert (bench.ended[0].error_code, bench.ended[0].request_id) == ("request_failed", "a")
    assert bench.posted == []


def test_an_abort_reaches_a_request_that_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    original = grammar_compiler.compile_matcher

    def slow(structured: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
        assert go_on.wait(LIMIT_S)
        return original(structured, tokenizer)

    monkeypatch.setattr(grammar_compiler, "compile_matcher", slow)
    bench.gate.put(Vocabulary(bench.vocabulary))
    bench.add("first", "x")
    bench.add("second", "y")
    for name in ("first", "second"):
        bench.gate.put(Abort(AbortRequest(request_id=name)))
    assert [(output.request_id, output.finish_reason) for output in bench.ended] == [("first", "abort"), ("second", "abort")]
    bench.gate.put(Abort(AbortRequest(request_id="first")))  # not known here any more: the loop's affair
    last = bench.add("last", "z")
    go_on.set()
    until(lambda: last in bench.posted)
    assert bench.posted == [Abort(AbortRequest(request_id="first")), last]
    assert bench.gate.new_matcher("first") is None
