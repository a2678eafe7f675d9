"""The small server's model against transformers, and its batches by the order of what they compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.bench.rungs.batch import Job, Worker
from headrace.bench.rungs.plain_model import Cache, Part, PlainModel
from headrace.bench.rungs.prefixes import KeptPrefixes
from headrace.config import EngineConfig
from tests.patience import LIMIT_S, until
from tests.runner.tiny_model import greedy_reference, save_tiny_llama

PROMPTS = ([5, 6, 7, 8, 9], [5, 6, 7, 100], [42], [5, 6, 7, 8, 9, 10, 11])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainModel, list[list[int]]]:
    """A model, and the answers of transformers to `PROMPTS`."""
    path = tmp_path_factory.mktemp("tiny")
    reference = save_tiny_llama(path)
    model = PlainModel(EngineConfig(model=str(path), dtype="float32", quantization="none", threads=1))
    return model, [greedy_reference(reference, prompt, 6) for prompt in PROMPTS]


@dataclass(slots=True, kw_only=True)
class Asked:
    """A job, and what came of it."""

    prompt: Sequence[int]
    max_tokens: int = 6
    ignore_eos: bool = True
    tokens: list[int] = field(default_factory=list)
    end: queue.SimpleQueue[Exception | None] = field(default_factory=queue.SimpleQueue)

    def job(self) -> Job:
        return Job(prompt=self.prompt, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, on_token=self.tokens.append, on_end=self.end.put)

    def wait(self) -> Exception | None:
        return self.end.get(timeout=LIMIT_S)


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("kept", [0, 100])
def test_answers_are_those_of_transformers(tiny: tuple[PlainModel, list[list[int]]], max_batch: int, kept: int):
    model, answers = tiny
    worker = Worker(model, max_batch=max_batch, window_s=0.2, prefixes=KeptPrefixes(kept) if kept else None)
    for _ in range(2):  # the second time prefixes are there
        asked = [Asked(prompt=prompt) for prompt in PROMPTS]
        for one in asked:
            worker.submit(one.job())
        assert [one.wait() for one in asked] == [None] * 4
        assert [one.tokens for one in asked] == answers


class Scripted:
    """A model that counts: the next token is one more than the last. It notes its steps, and each waits for a permit."""

    eos_token_ids = (99,)
    max_length = 1000

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int, int]]] = []  # row, start, tokens of each part
        self.permits = threading.Semaphore(0)
        self.fails = False

    def new_cache(self, rows: int, length: int) -> Cache:
        return Cache(layers=[], length=length)

    def step(self, cache: Cache, parts: Sequence[Part]) -> list[int]:
        self.steps.append([(part.row, part.start, len(part.token_ids)) for part in parts])
        assert self.permits.acquire(timeout=LIMIT_S)
        if self.fails:
            raise RuntimeError("out of memory")
        return [part.token_ids[-1] + 1 for part in parts]


def worker_of(model: Any, **fields: Any) -> Worker:
    return Worker(model, **({"max_batch": 8, "window_s": 0.0, "prefixes": None} | fields))


def test_who_comes_later_waits_for_the_next_batch():
    model = Scripted()
    worker = worker_of(model)
    first, second, third = Asked(prompt=[1, 2], max_tokens=3), Asked(prompt=[10], max_tokens=1), Asked(prompt=[20], max_tokens=2)
    worker.submit(first.job())
    until(lambda: model.steps)
    worker.submit(second.job())
    worker.submit(third.job())
    model.permits.release(3)
    assert first.wait() is None
    assert not second.tokens
    model.permits.release(2)
    assert third.wait() is None
    assert (first.tokens, second.tokens, third.tokens) == ([3, 4, 5], [11], [21, 22])
    assert model.steps[:3] == [[(0, 0, 2)], [(0, 2, 1)], [(0, 3, 1)]]
    assert model.steps[3] == [(0, 0, 1), (1, 0, 1)]
    assert model.steps[4] == [(0, 1, 1), (1, 1, 1)], "the row that has ended is computed with the other"
    until(lambda: worker.work.paths and worker.work.paths["ready"].steps == 5)
    assert worker.work.paths["ready"].tokens["useful"] == 2 + 1 + 1 + 1 + 1 + 1
    assert worker.work.paths["ready"].tokens["padding"] == 1


def test_an_end_token_ends_an_answer_unless_it_is_ignored():
    model = Scripted()
    model.permits.release(100)
    worker = worker_of(model)
    stops, goes_on = Asked(prompt=[97], ignore_eos=False), Asked(prompt=[97], max_tokens=4)
    for asked in (stops, goes_on):
        worker.submit(asked.job())
        assert asked.wait() is None
    assert (stops.tokens, goes_on.tokens) == ([98, 99], [98, 99, 100, 101])


def test_a_step_that_fails_ends_its_batch_and_no_other():
    model = Scripted()
    model.permits.release(100)
    worker = worker_of(model)
    model.fails = True
    lost = Asked(prompt=[1])
    worker.submit(lost.job())
    assert isinstance(lost.wait(), RuntimeError)
    model.fails = False
    good = Asked(prompt=[1], max_tokens=2)
    worker.submit(good.job())
    assert good.wait() is None


def test_long_prompts_are_computed_in_several_steps():
    model = Scripted()
    model.permits.release(100)
    worker = worker_of(model, window_s=0.2)
    asked = [Asked(prompt=range(length), max_tokens=1) for length in (3000, 2000, 5000, 10)]
    for one in asked:
        worker.submit(one.job())
    assert [one.wait() for one in asked] == [None] * 4
    lengths = [[tokens for _, _, tokens in step] for step in model.steps]
    assert [length for step in lengths for length in step] == [3000, 2000, 5000, 10]
    assert all(sum(step) <= 4096 or len(step) == 1 for step in lengths)


def test_only_what_is_new_of_a_prompt_is_computed():
    model = Scripted()
    model.permits.release(100)
    worker = worker_of(model, prefixes=KeptPrefixes(12))
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 4], [1, 2, 3, 4, 5], range(50, 60), [1, 2, 3, 4]):
        asked = Asked(prompt=prompt, max_tokens=1)
        worker.submit(asked.job())
        assert asked.wait() is None
    # the whole prompt again: its last token is computed; the sixth finds that the fifth has taken the room
    assert model.steps == [[(0, 0, 4)], [(0, 3, 1)], [(0, 3, 1)], [(0, 4, 1)], [(0, 0, 10)], [(0, 0, 4)]]
