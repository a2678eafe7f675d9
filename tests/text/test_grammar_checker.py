"""Grammars are tried out in a process that may take long, or die, without harm to anybody else."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.text import grammar_checker
from headrace.text.grammar_checker import GrammarChecker
from tests.patience import LIMIT_S
from tests.text.tiny_tokenizers import byte_level

# Chains of rules, which the library follows by recursion; and rules that double.
DEEP = StructuredOutputs(kind="grammar", source="start: r0\n" + "".join(f'r{i}: "a" | r{i + 1}\n' for i in range(9000)) + 'r9000: "x"')
LONG = StructuredOutputs(kind="grammar", source="start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "x"')
GOOD = StructuredOutputs(kind="regex", source="[0-9]+", param="guided_regex")


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(byte_level(tmp_path_factory.mktemp("tokenizer")))
    yield checker
    checker.close()


def reason(checker: GrammarChecker, structured: StructuredOutputs) -> str:
    with pytest.raises(InvalidRequest) as caught:
        checker.check_now(structured)
    assert caught.value.param == structured.param
    return caught.value.message


def test_verdicts(checker: GrammarChecker) -> None:
    checker.check_now(GOOD)
    assert "unclosed" in reason(checker, StructuredOutputs(kind="regex", source="[a", param="guided_regex"))
    assert "control" not in reason(checker, StructuredOutputs(kind="grammar", source="start: <|nothing|>"))
    checker.check_now(StructuredOutputs(kind="grammar", source='start: "a" <|im_end|>'))


def test_what_ends_the_process_is_refused_and_the_next_form_is_not(checker: GrammarChecker) -> None:
    assert "cannot compile it" in reason(checker, DEEP)
    checker.check_now(StructuredOutputs(kind="regex", source="[a-z]+"))


def test_what_takes_too_long_is_refused(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    checker.check_now(StructuredOutputs(kind="regex", source="[a-y]+"))
    monkeypatch.setattr(grammar_checker, "TRY_S", 0.05)
    assert "takes too long" in reason(checker, LONG)


def test_verdicts_are_remembered(checker: GrammarChecker) -> None:
    checker.check_now(GOOD)
    bad = StructuredOutputs(kind="grammar", source='start: "a" b')
    first = reason(checker, bad)
    worker, checker._worker = checker._worker, None
    try:
        checker.check_now(GOOD)
        assert reason(checker, bad) == first
        assert checker._worker is None
    finally:
        checker._worker = worker
    other = StructuredOutputs(kind="grammar", source='start: "a" b', param="tools")
    assert reason(checker, other).startswith("tools ")


def test_only_so_many_verdicts_are_remembered(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_VERDICTS", 3)
    for number in range(5):
        checker.check_now(StructuredOutputs(kind="choice", source=f'["{number}"]'))
    assert len(checker._verdicts) == 3


async def test_the_event_loop_goes_on_meanwhile(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(checker, "_try", lambda structured: None if go_on.wait(LIMIT_S) else "nobody let it go on")
    task = asyncio.create_task(checker.check(StructuredOutputs(kind="grammar", source='start: "meanwhile"')))
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert not task.done()
    go_on.set()
    await task


def test_the_process_is_started_for_the_first_form_and_is_nice(tmp_path: Path) -> None:
    checker = GrammarChecker(byte_level(tmp_path))
    assert checker._worker is None
    checker.check_now(StructuredOutputs(kind="json_object"))
    worker = checker._worker
    assert worker is not None
    assert os.getpriority(os.PRIO_PROCESS, worker._process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + grammar_checker.NICE)
    checker.check_now(GOOD)
    assert checker._worker is worker
    checker.close()


def test_closing_ends_the_process(tmp_path: Path) -> None:
    checker = GrammarChecker(byte_level(tmp_path))
    checker.check_now(GOOD)
    worker = checker._worker
    assert worker is not None
    checker.close()
    assert worker._process.returncode is not None
    checker.close()
