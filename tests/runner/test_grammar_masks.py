"""Answers held by grammars: in the masks, in the sampler, and under whatever a scheduler does to the requests."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.messages import SchedulerStats, SlotStart
from headrace.runner import grammar_masks
from headrace.runner.grammar_masks import NO_GRAMMAR, TOO_SLOW, GrammarMasks, _forbid, _unpack
from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams, StructuredOutputs
from tests.runner.grammars import TOKENS, Grammars, text_of
from tests.runner.test_with_scheduler import SCHEDULES, run
from tests.runner.tiny_model import EOS, Hand, save_tiny_llama

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "tall": {"type": "boolean"}, "mood": {"enum": ["red", "ab"]}},
    "required": ["name", "tall", "mood"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputs(kind="json_schema", source=json.dumps(PERSON)),
    StructuredOutputs(kind="regex", source="[0-9]{3}-[a-f]{4}"),
    StructuredOutputs(kind="choice", source='["red", "red and green", "12"]'),
]


def keeps(form: StructuredOutputs, text: str) -> bool:
    if form.kind == "json_schema":
        value = json.loads(text)
        return set(value) == {"name", "tall", "mood"} and len(value["name"]) <= 6 and type(value["tall"]) is bool and value["mood"] in ("red", "ab")
    return text in json.loads(form.source) if form.kind == "choice" else re.fullmatch(form.source, text) is not None


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory)
    return EngineConfig(
        model=str(directory), device="cpu", threads=1, max_num_seqs=8, max_num_batched_tokens=256, block_size=4, num_gpu_blocks_override=256
    )


class Masks:
    """GrammarMasks of one slot a request."""

    def __init__(self, forms: dict[str, StructuredOutputs], **options: Any) -> None:
        self.grammars = Grammars(forms, **options)
        self.masks = GrammarMasks(self.grammars, num_slots=8, num_threads=1)

    def start(self, slot: int, name: str, *, answer: Sequence[int] = (), eos: tuple[int, ...] = EOS) -> str | None:
        params = SamplingParams(structured=self.grammars.structured.get(name, StructuredOutputs(kind="json_object")))
        return self.masks.start(SlotStart(request_id=name, slot=slot, token_ids=(1, *answer), num_prompt_tokens=1, params=params, eos_token_ids=eos))

    def allowed(self, slot: int, *, vocab_size: int = 128) -> list[bytes]:
        assert self.masks.wait([slot]) == {}
        logits = torch.zeros(2, vocab_size)
        self.masks.apply(logits, [1], [slot])
        assert not logits[0].any()
        return [TOKENS[token] for token in torch.nonzero(logits[1] == 0).flatten().tolist()]


def test_masks_follow_the_tokens():
    masks = Masks({"a": FORMS[1], "b": FORMS[2]})
    assert masks.start(0, "a") is None
    assert masks.start(5, "b") is None
    assert sorted(masks.allowed(0)) == sorted([b"12", *(str(digit).encode() for digit in range(10))])
    assert masks.allowed(5) == [b"red", b"12", b"1", b"r"]
    assert masks.masks.consume(0, TOKENS.index(b"12")) == (False, None)
    assert masks.allowed(0) == [str(digit).encode() for digit in range(10)]
    assert masks.masks.consume(5, TOKENS.index(b"red")) == (False, None)
    assert masks.allowed(5) == [b" and ", b" ", b"</s>"]
    assert masks.masks.consume(5, EOS[0]) == (True, None)


def test_a_complete_grammar_is_seen_at_its_last_token():
    masks = Masks({"a": FORMS[2]})
    masks.start(0, "a")
    assert masks.masks.consume(0, TOKENS.index(b"12")) == (True, None)
    assert masks.masks.wait([0]) == {0: NO_GRAMMAR}  # of a row that was planned before this was known


def test_a_slot_starts_in_the_midst_of_an_answer():
    masks = Masks({"a": FORMS[1]})
    assert masks.start(0, "a", answer=[TOKENS.index(b"12"), TOKENS.index(b"3"), TOKENS.index(b"-")]) is None
    assert masks.allowed(0) == [b"ab", *(bytes([code]) for code in b"abcdef")]
    fault = masks.start(0, "a", answer=[TOKENS.index(b"x")])
    assert fault is not None
    assert fault.startswith("the grammar cannot be followed")


def test_a_request_without_its_grammar_fails():
    masks = Masks({"a": FORMS[1]})
    assert masks.start(0, "unknown") == NO_GRAMMAR
    assert not masks.masks.holds(0)
    assert GrammarMasks(None, num_slots=1, num_threads=1).start(
        SlotStart(request_id="a", slot=0, token_ids=(1,), num_prompt_tokens=1, params=SamplingParams(structured=FORMS[0]), eos_token_ids=EOS)
    )


def test_a_token_against_the_grammar_is_a_fault():
    masks = Masks({"a": FORMS[1]})
    masks.start(0, "a")
    complete, fault = masks.masks.consume(0, TOKENS.index(b"x"))
    assert not complete
    assert fault is not None


def test_control_tokens_and_rows_beyond_the_vocabulary_are_never_allowed():
    masks = Masks({"a": StructuredOutputs(kind="regex", source="(.|\n)*")}, control=(0, 65, 66))
    masks.start(0, "a")
    allowed = masks.allowed(0, vocab_size=200)
    assert b"A" not in allowed
    assert b"B" not in allowed
    assert len(allowed) == 128 - 3


def test_an_end_that_is_to_be_ignored_comes_only_where_nothing_else_can():
    masks = Masks({"a": FORMS[2], "b": StructuredOutputs(kind="regex", source="(ab)?")})
    masks.start(0, "a", answer=[TOKENS.index(b"red")], eos=())
    assert masks.allowed(0) == [b" and ", b" "]
    masks.start(0, "a", answer=[TOKENS.index(b"red")])
    assert masks.allowed(0) == [b" and ", b" ", b"</s>"]
    assert not masks.masks.ends_only(0, np.asarray(EOS))
    assert masks.masks.ends_only(0, np.asarray([*EOS, TOKENS.index(b" and "), TOKENS.index(b" ")]))


@pytest.mark.parametrize("vocab_size", [150, 160, 170])
def test_both_ways_to_apply_a_mask_agree(vocab_size: int):
    words = np.random.default_rng(0).integers(-(2**31), 2**31, size=(3, 5), dtype=np.int64).astype(np.int32)
    allowed = _unpack(torch.from_numpy(words), vocab_size)
    rows = np.zeros((3, vocab_size), dtype=np.float32)
    for row, mask in zip(rows, words, strict=True):
        _forbid(row, mask)
    assert torch.equal(torch.from_numpy(rows) == 0, allowed)
    assert 0 < int(allowed.sum()) < 3 * 150


class SlowMatcher:
    """Takes a while for each mask."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.go_on = threading.Event()

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        if not self.go_on.is_set():
            end = time.thread_time() + self.seconds
            while time.thread_time() < end and not self.go_on.is_set():
                time.sleep(0 if self.seconds < 1 else 0.01)

    def consume_token(self, token: int) -> bool:
        return True

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def deep_copy(self) -> SlowMatcher:
        return self


def test_a_mask_that_takes_too_long_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch):
    masks = Masks({"a": FORMS[1], "b": FORMS[1]})
    slow = SlowMatcher(1e6)
    masks.grammars._matchers["b"] = slow  # type: ignore[assignment]
    masks.start(0, "b")
    masks.start(1, "a")
    assert masks.masks.wait([1]) == {}
    with monkeypatch.context() as patch:
        patch.setattr(grammar_masks, "MAX_WAIT_S", 0.3)
        assert masks.masks.wait([1, 0]) == {0: TOO_SLOW}
    assert not masks.masks.holds(0)
    masks.start(0, "a")
    assert len(masks.allowed(0)) == 11  # while the lost thread still runs
    slow.go_on.set()


def test_masks_that_cost_too_much_in_all_fail_their_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_masks, "FREE_S", 0.05)
    masks = Masks({"a": FORMS[1]})
    masks.grammars._matchers["a"] = SlowMatcher(0.02)  # type: ignore[assignment]
    masks.start(0, "a")
    faults: dict[int, str] = {}
    for _ in range(20):
        faults = masks.masks.wait([0])
        if faults:
            break
        masks.masks.consume(0, 1)
    assert faults == {0: TOO_SLOW}


def held_answers(config: EngineConfig, *, ahead: bool, rounds: int) -> tuple[list[list[int]], SchedulerStats]:
    """Twelve prompts under three forms, greedy and drawn."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 126, size=int(rng.integers(1, 40))).tolist() for _ in range(12)]
    params = [SamplingParams(temperature=float(index % 3), seed=index, max_tokens=70, structured=FORMS[index // 4]) for index in range(12)]
    forms = {f"{turn}-{index}": FORMS[index // 4] for turn in range(rounds) for index in range(12)}
    return run(ModelRunner(config, Grammars(forms)), config, prompts, params, ahead=ahead, rounds=rounds)


@pytest.fixture(scope="module")
def wanted(config: EngineConfig) -> list[list[int]]:
    answers, _ = held_answers(config, ahead=False, rounds=1)
    for index, answer in enumerate(answers):
        assert keeps(FORMS[index // 4], text_of(answer)), text_of(answer)
    return answers


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("schedule", ["one at a time", "chunked", "recompute", "swap and prefix hits"])
def test_answers_keep_their_form_whatever_the_schedule(config: EngineConfig, wanted: list[list[int]], schedule: str, ahead: bool) -> None:
    changes, rounds = SCHEDULES[schedule]
    answers, stats = held_answers(replace(config, **changes), ahead=ahead, rounds=rounds)
    assert answers == wanted
    assert bool(stats.preemptions_swap_total) == schedule.startswith("swap")
    assert schedule != "recompute" or stats.preemptions_recompute_total > 0


def test_a_grammar_changes_no_neighbour(config: EngineConfig) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = Hand(ModelRunner(config))
    alone.add("free", [1, 2, 3], free)
    alone.finish(["free"], 12)
    hand = Hand(ModelRunner(config, Grammars({"held": FORMS[1]})))
    hand.add("free", [1, 2, 3], free)
    hand.add("held", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12, structured=FORMS[1], logprobs=2))
    hand.add("lost", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12, structured=FORMS[0]))
    free_row, held_row, lost_row = hand.step({"free": 3, "held": 3, "lost": 3})
    assert lost_row.error == NO_GRAMMAR
    assert held_row.logprobs is not None  # of the raw logits: the token that was drawn, then the likeliest two
    assert held_row.logprobs[0].token_id == held_row.token_ids[0]
    assert free_row.error is None
    while not hand.tracks["held"].results[-1].complete:
        hand.step({"free": 1, "held": 1})
    assert keeps(FORMS[1], text_of(hand.tracks["held"].answer))
    hand.finish(["free"], 12)
    assert hand.tracks["free"].answer[:12] == alone.tracks["free"].answer


def test_min_tokens_gives_way_where_a_grammar_can_only_end(config: EngineConfig) -> None:
    form = StructuredOutputs(kind="regex", source="(ab|x){1,3}")
    hand = Hand(ModelRunner(config, Grammars({"a": form, "b": form})))
    hand.add("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12, min_tokens=10, structured=form))
    hand.add("b", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12, logit_bias={EOS[0]: 100}, structured=form))
    hand.step({"a": 3, "b": 3})
    while not hand.tracks["a"].results[-1].complete:
        hand.step({"a": 1})
    assert len(re.findall("ab|x", text_of(hand.tracks["a"].answer))) == 3
    hand.step({"b": 1})
    if hand.tracks["b"].answer[0] == TOKENS.index(b"a"):
        hand.step({"b": 1})
    assert hand.tracks["b"].answer[-1] == EOS[0]


def test_what_leaves_no_token_fails_alone(config: EngineConfig) -> None:
    hand = Hand(ModelRunner(config, Grammars({"a": FORMS[1]})))
    hand.add("a", [1, 2, 3], SamplingParams(max_tokens=12, structured=FORMS[1], allowed_token_ids=(TOKENS.index(b"x"),)))
    (row,) = hand.step({"a": 3})
    assert row.error is not None
    assert "the grammar" in row.error
