"""Guesses change no answer: whatever is guessed, what is sampled is what would have been sampled without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.messages import TokenLogprobs
from headrace.runner.fake import FakeRunner, FakeScript, PlanError
from headrace.runner.interface import NON_FINITE, Runner
from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from tests.runner.tiny_model import Hand, save_tiny_llama

NEW = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3, "seed": 5},
    "filtered": {"temperature": 1.3, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "seed": 6},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "drawn with penalties": {"temperature": 0.9, "seed": 7, "frequency_penalty": 1.0},
    "bad words": {
        "temperature": 0.7,
        "seed": 8,
        "bad_words_ids": ((3,), (4, 5), (6, 7, 8), *((first, last) for first in range(20) for last in range(40))),
    },
    "min tokens": {"temperature": 1.5, "seed": 9, "min_tokens": 9, "stop_token_ids": tuple(range(60))},
    "bias": {"temperature": 1.0, "seed": 10, "logit_bias": {3: 5.0, 4: -100.0}},
    "allowed": {"temperature": 1.0, "seed": 11, "allowed_token_ids": tuple(range(12))},
    "logprobs": {"temperature": 1.0, "seed": 12, "logprobs": 3},
}


@pytest.fixture(scope="module")
def model_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    runner = ModelRunner(
        EngineConfig(model=str(path), device="cpu", threads=1, max_num_seqs=16, max_num_batched_tokens=256, block_size=4, kv_memory=1 << 20)
    )
    yield runner
    runner.close()


def prompts() -> dict[str, list[int]]:
    rng = random.Random(1)
    return {name: [rng.randrange(126) for _ in range(rng.randrange(1, 30))] for name in OPTIONS}


def started(runner: Runner, *, first_step: int = 0) -> Hand:
    hand = Hand(runner)
    hand.step_id = first_step  # a fake runner wants them to rise
    for name, prompt in prompts().items():
        hand.add(name, prompt, SamplingParams(max_tokens=None, **OPTIONS[name]))
    hand.step({name: len(prompt) for name, prompt in prompts().items()})
    return hand


def answer_and_scores(hand: Hand, name: str) -> tuple[list[int], list[TokenLogprobs]]:
    track = hand.tracks[name]
    scores = [entry for result in track.results for entry in result.logprobs or ()]
    assert len(scores) == (len(track.answer) if track.params.logprobs is not None else 0)
    return track.answer[:NEW], scores[:NEW]


def check_guesses_change_nothing(runner: Runner, *, same_scores: bool) -> None:
    plain = started(runner)
    plain.finish(list(OPTIONS), NEW + 8)
    for seed in (1, 2):
        rng = random.Random(seed)
        hand = started(runner, first_step=1000 * seed)
        num_guessed = num_right = 0
        while unfinished := [name for name in OPTIONS if len(hand.tracks[name].answer) < NEW]:
            guesses: dict[str, list[int]] = {}
            for name in unfinished:
                known = len(hand.tracks[name].answer)
                right = plain.tracks[name].answer[known : known + rng.randrange(6)]
                guesses[name] = [token if rng.random() < 0.8 else rng.randrange(126) for token in right]
            rows = hand.step(dict.fromkeys(unfinished, 1), guesses=guesses)
            assert all(row.error is None for row in rows)
            num_guessed += sum(map(len, guesses.values()))
            num_right += sum(len(row.token_ids) - 1 for row in rows)
        assert num_guessed > num_right > 100
        for name in OPTIONS:
            (answer, scores), (expected, expected_scores) = answer_and_scores(hand, name), answer_and_scores(plain, name)
            assert answer == expected, name
            for score, wanted in zip(scores, expected_scores, strict=True):
                assert (score.token_id, score.rank, [token for token, _ in score.top]) == (wanted.token_id, wanted.rank, [t for t, _ in wanted.top])
                assert score.logprob == wanted.logprob if same_scores else score.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_no_option_gives_other_tokens(model_runner: ModelRunner) -> None:
    check_guesses_change_nothing(model_runner, same_scores=False)


def test_the_fake_does_the_same() -> None:
    config = EngineConfig(model="fake", max_num_seqs=16, block_size=4)
    check_guesses_change_nothing(FakeRunner(config, FakeScript(vocab_size=128, eos_token_ids=(127,), num_blocks=1000, echo=2)), same_scores=True)


def test_the_fake_takes_guesses_only_behind_the_last_token() -> None:
    hand = Hand(FakeRunner(EngineConfig(model="fake", max_num_seqs=16, block_size=4), FakeScript()))
    hand.add("a", [1, 2, 3])
    with pytest.raises(PlanError, match="guesses 1 tokens elsewhere"):
        hand.step({"a": 2}, guesses={"a": [4]})


@pytest.mark.parametrize("place", [0, 2])
def test_non_finite_logits_behind_a_guess_end_what_is_taken(model_runner: ModelRunner, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those at a later place cost the tokens from there on; those at the first fail the request, once it has been computed alone."""
    name = "greedy"
    plain = started(model_runner)
    plain.finish([name], 8)
    hand = started(model_runner)
    compute_logits, calls = model_runner._model.compute_logits, []

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden).clone()
        if len(hidden) > 1:
            logits[place] = float("nan")
        calls.append(len(hidden))
        return logits

    monkeypatch.setattr(model_runner._model, "compute_logits", broken)
    right = plain.tracks[name].answer
    (row,) = hand.step({name: 1}, guesses={name: right[1:5]})
    assert row.error is None
    assert list(row.token_ids) == right[1 : 1 + (place or 1)]
    assert calls == ([5, 1] if place == 0 else [5])
    monkeypatch.setattr(model_runner._model, "compute_logits", lambda hidden: compute_logits(hidden) * float("nan"))
    (row,) = hand.step({name: 1}, guesses={name: [1, 2]})
    assert row.error == NON_FINITE
