from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.messages import Row, SlotStart, StepPlan
from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.runner.interface import LOST_SLOT, NON_FINITE
from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from tests.runner.tiny_model import EOS, GREEDY, Hand, greedy_reference, save_tiny_llama

NEW = 12
LENGTHS = (1, 3, 4, 7, 17, 33, 50)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    return save_tiny_llama(model_path)


@pytest.fixture(scope="module")
def config(model_path: Path, reference: Any) -> EngineConfig:
    return EngineConfig(
        model=str(model_path),
        device="cpu",
        threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=4,
        kv_memory=1 << 19,
        swap_space=1 << 17,
    )


@pytest.fixture(scope="module")
def shared(config: EngineConfig) -> Iterator[ModelRunner]:
    runner = ModelRunner(config)
    yield runner
    runner.close()


@pytest.fixture
def hand(shared: ModelRunner) -> Hand:
    return Hand(shared)


class Cases(NamedTuple):
    prompts: list[list[int]]
    expected: list[list[int]]  # what transformers answers


@pytest.fixture(scope="module")
def cases(reference: Any) -> Cases:
    rng = random.Random(5)
    prompts = [[rng.randrange(126) for _ in range(length)] for length in LENGTHS]
    return Cases(prompts, [greedy_reference(reference, prompt, NEW) for prompt in prompts])


def test_info_and_sizes(shared: ModelRunner) -> None:
    info = shared.info(1.5)
    assert (info.dtype, info.device, info.threads, info.load_seconds) == ("float32", "cpu", 1, 1.5)
    kernels = cpu.load()
    assert info.path == ("eager, torch operators (no CPU kernels)" if kernels is None else f"eager, CPU kernels ({kernels.isa})")
    assert info.max_model_len == shared.max_model_len == 256
    assert info.vocab_size == shared.vocab_size == 128
    assert shared.eos_token_ids == EOS
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4  # k and v, layers, tokens, heads, size, bytes
    assert info.num_blocks == shared.num_blocks == (1 << 19) // block_bytes
    assert shared.num_host_blocks == (1 << 17) // block_bytes
    assert info.kv_bytes == info.num_blocks * block_bytes
    assert info.weight_bytes > 0


def test_alone(hand: Hand, cases: Cases) -> None:
    for index, prompt in enumerate(cases.prompts):
        hand.add(str(index), prompt, slot=index % 3)
        hand.finish([str(index)], NEW)
        assert hand.tracks[str(index)].answer == cases.expected[index]


def test_kernels_of_the_steps_in_a_profile(shared: ModelRunner, hand: Hand, cases: Cases) -> None:
    for _ in range(2):
        shared.start_profile()
        begin = time.monotonic()
        hand.add("a", cases.prompts[0], slot=0)
        hand.finish(["a"], 2)
        end = time.monotonic()
        kernels = shared.stop_profile()()
        hand.tracks.clear()
        assert "aten::copy_" in {kernel.name for kernel in kernels}
        assert {kernel.device for kernel in kernels} == {"cpu"}
        assert all(begin - 0.01 < kernel.begin <= kernel.end < end + 0.01 for kernel in kernels)


@pytest.mark.parametrize("chunk", [1, 5, 16, 10_000])
def test_batched_and_chunked(hand: Hand, cases: Cases, chunk: int) -> None:
    """Short cases.prompts decode while long ones still prefill, so chunks and single tokens share steps."""
    for index, prompt in enumerate(cases.prompts):
        hand.add(str(index), prompt)
    hand.finish([str(index) for index in range(len(cases.prompts))], NEW, chunk=chunk)
    assert [track.answer for track in hand.tracks.values()] == cases.expected


def test_prefix_blocks_of_another_request(hand: Hand, cases: Cases) -> None:
    first = hand.add("first", cases.prompts[-1][:42])
    hand.finish(["first"], 3)
    second = hand.add("second", cases.prompts[-1])
    second.blocks, second.computed = first.blocks[:10], 40
    hand.finish(["second"], NEW)
    assert second.answer == cases.expected[-1]


def test_rows_of_one_step_share_the_blocks_that_one_of_them_fills(hand: Hand, cases: Cases) -> None:
    first, second = hand.add("first", cases.prompts[-1]), hand.add("second", cases.prompts[-1])
    hand.step({"first": 40})
    first.blocks += [hand.free.pop(0), hand.free.pop(0)]  # tokens 40 to 47, computed in the next step
    second.blocks, second.computed = list(first.blocks), 48
    hand.step({"second": 2, "first": 8})
    hand.finish(["first", "second"], NEW)
    assert first.answer == second.answer == cases.expected[-1]


def test_recompute_after_preemption(hand: Hand, cases: Cases) -> None:
    for index, prompt in enumerate(cases.prompts):
        hand.add(str(index), prompt)
    names = list(hand.tracks)
    hand.finish(names, 5)
    for index in (1, 4, 6):
        track = hand.tracks[str(index)]
        hand.free += track.blocks
        track.blocks, track.computed, track.started, track.slot = [], 0, False, {1: 4, 4: 6, 6: 1}[index]
    hand.finish(names, NEW, chunk=9)
    assert [track.answer for track in hand.tracks.values()] == cases.expected


def test_swap_out_and_in(hand: Hand, cases: Cases) -> None:
    for index, prompt in enumerate(cases.prompts):
        hand.add(str(index), prompt)
    names = list(hand.tracks)
    hand.finish(names, 5)
    away = hand.tracks["5"]
    out = tuple(zip(away.blocks, range(3, 3 + len(away.blocks)), strict=True))
    others = {name: 1 for name in names if name != "5"}
    hand.step(others, swap_out=out)
    hand.step({"0": 1}, copies=tuple((hand.tracks["0"].blocks[0], block) for block in away.blocks))  # what was there is overwritten
    new = [hand.free.pop(0) for _ in away.blocks]
    away.blocks, away.started = new, False
    hand.step({**others, "5": 1}, swap_in=tuple((host, block) for (_, host), block in zip(out, new, strict=True)))
    hand.finish(names, NEW)
    assert [track.answer[:NEW] for track in hand.tracks.values()] == cases.expected


def test_fork_copies_the_last_block(hand: Hand, cases: Cases) -> None:
    prompt = cases.prompts[-1]  # 50 tokens: the last block holds two
    first = hand.add("first", prompt)
    hand.step({"first": 50})
    fork = hand.add("fork", prompt)
    own = hand.free.pop(0)
    fork.blocks, fork.computed = [*first.blocks[:12], own], 49
    hand.step({"first": 1, "fork": 1}, copies=((first.blocks[12], own),))
    hand.finish(["first", "fork"], NEW)
    assert first.answer == fork.answer == cases.expected[-1]


def test_seeded_requests_do_not_see_the_schedule(config: EngineConfig, cases: Cases) -> None:
    params = [
        SamplingParams(seed=index, temperature=1.2, top_p=0.95 if index % 2 else 1.0, repetition_penalty=1.1) for index in range(len(cases.prompts))
    ]
    answers = []
    for chunk in (10_000, 7):
        hand = Hand(ModelRunner(config))
        order = list(range(len(cases.prompts)))[:: 1 if chunk > 100 else -1]
        for index in order:
            hand.add(str(index), cases.prompts[index], params[index])
        if chunk > 100:
            for index in order:
                hand.finish([str(index)], NEW)
        else:
            hand.finish([str(index) for index in order], NEW, chunk=chunk)
        answers.append([hand.tracks[str(index)].answer for index in range(len(cases.prompts))])
    assert answers[0] == answers[1]


def test_unseeded_requests_differ_unless_the_engine_is_seeded(config: EngineConfig, cases: Cases) -> None:
    def run(seed: int | None) -> list[list[int]]:
        hand = Hand(ModelRunner(replace(config, seed=seed)))
        for name in ("a", "b"):
            hand.add(name, cases.prompts[0], SamplingParams(temperature=1.5))
        hand.finish(["a", "b"], NEW)
        return [track.answer for track in hand.tracks.values()]

    fresh, again = run(None), run(None)
    assert fresh[0] != fresh[1]
    assert fresh != again
    assert run(3) == run(3)


@pytest.mark.parametrize("chunk", [6, 10_000])
def test_prompt_logprobs(hand: Hand, reference: Any, cases: Cases, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runner.model_runner._PROMPT_LOGITS", 128 * 5)
    for index, prompt in enumerate(cases.prompts):
        hand.add(str(index), prompt, replace(GREEDY, prompt_logprobs=2, logprobs=1))
    hand.finish(list(hand.tracks), 3, chunk=chunk)
    for index, prompt in enumerate(cases.prompts):
        track = hand.tracks[str(index)]
        with torch.inference_mode():
            wanted = torch.log_softmax(reference(torch.tensor([[*prompt, *track.answer[:3]]])).logits[0].double(), dim=-1)
        got = [entry for row in track.results for entry in row.prompt_logprobs or ()]
        assert [entry.token_id for entry in got] == prompt[1:]
        for position, entry in enumerate(got):
            assert entry.logprob == pytest.approx(float(wanted[position, entry.token_id]), abs=1e-4)
            assert entry.rank == int((wanted[position] > wanted[position, entry.token_id]).sum()) + 1
            assert [token for token, _ in entry.top] == wanted[position].topk(2).indices.tolist()
        answer = [entry for row in track.results for entry in row.logprobs or ()]
        assert [entry.token_id for entry in answer] == track.answer
        for place, entry in enumerate(answer):
            assert entry.rank == 1
            assert entry.logprob == pytest.approx(float(wanted[len(prompt) - 1 + place].max()), abs=1e-4)


def poison(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, token: int, *, times: int) -> list[int]:
    """Hidden states of `token` become NaN in the next so many forward passes that see it."""
    seen: list[int] = []
    original = runner._model.forward

    def forward(input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden = original(input_ids, *rest).clone()
        hit = input_ids == token
        if bool(hit.any()) and len(seen) < times:
            seen.append(len(input_ids))
            hidden[hit] = float("nan")
        return hidden

    monkeypatch.setattr(runner._model, "forward", forward)
    return seen


def test_non_finite_logits_are_computed_once_more(shared: ModelRunner, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(shared)
    for index, prompt in enumerate(cases.prompts):
        hand.add(str(index), prompt)
    seen = poison(shared, monkeypatch, cases.prompts[3][-1], times=1)
    hand.finish(list(hand.tracks), NEW)
    assert seen == [sum(LENGTHS)]
    assert [track.answer for track in hand.tracks.values()] == cases.expected


def test_a_request_with_non_finite_logits_fails_alone(shared: ModelRunner, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(shared)
    unused = set(range(127)) - {token for ids in (*cases.prompts, *cases.expected) for token in ids}
    bad_token = unused.pop()
    hand.add("bad", [bad_token], replace(GREEDY, logprobs=2))
    for index, prompt in enumerate(cases.prompts):
        hand.add(str(index), prompt)
    poison(shared, monkeypatch, bad_token, times=1000)
    rows = hand.step({"bad": 1, **{str(index): len(prompt) for index, prompt in enumerate(cases.prompts)}})
    assert rows[0].error == NON_FINITE
    assert rows[0].token_ids == ()
    ahead = Row(request_id="bad", slot=0, start=1, num_tokens=1, token_ids=(), block_offset=1, new_block_ids=(), sample=True)
    assert shared.execute(StepPlan(step_id=99, rows=(ahead,))).rows[0].error == LOST_SLOT
    hand.finish([str(index) for index in range(len(cases.prompts))], NEW)
    assert [hand.tracks[str(index)].answer for index in range(len(cases.prompts))] == cases.expected


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((5, 128), GREEDY, "token 128"),
        ((5, -1), GREEDY, "token -1"),
        ((5,), replace(GREEDY, logit_bias={500: 1.0}), "logit_bias names token 500"),
        ((5,), replace(GREEDY, allowed_token_ids=(7,), bad_words_ids=((7,),)), "no token is left"),
    ],
)
def test_a_request_that_cannot_be_honoured_fails_alone(
    hand: Hand, cases: Cases, prompt: tuple[int, ...], params: SamplingParams, message: str
) -> None:
    hand.add("bad", prompt, params)
    hand.add("good", cases.prompts[2])
    bad, good = hand.step({"bad": len(prompt), "good": len(cases.prompts[2])})
    assert bad.error is not None
    assert message in bad.error
    assert good.error is None
    hand.finish(["good"], NEW)
    assert hand.tracks["good"].answer == cases.expected[2]


def test_a_step_that_raises_empties_the_slots_of_its_rows(shared: ModelRunner, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(shared)
    for name in ("a", "b"):
        hand.add(name, cases.prompts[2])
    hand.step({"a": len(cases.prompts[2])})
    hand.step({"b": len(cases.prompts[2])})

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(shared._model, "forward", broken)
        with pytest.raises(RuntimeError, match="broken"):
            hand.step({"a": 1})
    assert hand.step({"a": 1})[0].error == LOST_SLOT
    hand.finish(["b"], NEW)
    assert hand.tracks["b"].answer == cases.expected[2]


def test_a_row_of_a_slot_that_was_given_away_is_not_run(hand: Hand) -> None:
    hand.add("old", [1, 2, 3])
    hand.step({"old": 3})
    start = SlotStart(request_id="new", slot=0, token_ids=(4,), num_prompt_tokens=1, params=GREEDY, eos_token_ids=())
    new = Row(request_id="new", slot=0, start=0, num_tokens=1, token_ids=(4,), block_offset=0, new_block_ids=(hand.free.pop(0),), sample=True)
    assert hand.runner.execute(StepPlan(step_id=50, rows=(new,), starts=(start,))).rows[0].error is None
    old = Row(request_id="old", slot=0, start=3, num_tokens=1, token_ids=(), block_offset=1, new_block_ids=(), sample=True)
    assert hand.runner.execute(StepPlan(step_id=51, rows=(old,))).rows[0].error == LOST_SLOT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "--device tpu"),
        ({"device": "mps"}, "--device mps is not supported"),
        ({"device": "cuda:99"}, "--device cuda:99"),
        ({"max_model_len": 257}, "--max-model-len 257 is beyond the 256 positions"),
        ({"kv_memory": 40 * 2048}, "holds 160 tokens.*raise --kv-memory to 131072 bytes, or set --max-model-len to at most 160"),
    ],
)
def test_a_start_that_cannot_work_says_why(config: EngineConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelRunner(replace(config, **changes))
