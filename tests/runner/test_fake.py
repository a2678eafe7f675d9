from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.core.messages import Row, SlotStart, StepPlan
from headrace.errors import ConfigError, StartError
from headrace.runner.factory import make_runner
from headrace.runner.fake import FakeRunner, FakeScript, KVMismatch, PlanError
from headrace.runner.interface import LOST_SLOT, NON_FINITE
from headrace.sampling_params import SamplingParams
from tests.runner.tiny_model import GREEDY, Hand

FACTORY = "headrace.runner.fake:make"


def make(swap_space: int = 0, **script: Any) -> FakeRunner:
    config = EngineConfig(model=json.dumps(script), block_size=4, max_num_seqs=8, swap_space=swap_space, runner_factory=FACTORY)
    runner = make_runner(config)
    assert isinstance(runner, FakeRunner)
    return runner


def test_it_loads_no_torch() -> None:
    code = "import sys, headrace.runner.fake, headrace.runner.factory, headrace.runner.interface; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_answers_do_not_depend_on_the_schedule() -> None:
    prompts = [[index] * length for index, length in enumerate((1, 5, 9, 20))]
    answers = []
    for chunk in (10_000, 3):
        hand = Hand(make())
        for index, prompt in enumerate(prompts):
            hand.add(str(index), prompt, GREEDY if index % 2 else SamplingParams(seed=index))
        hand.finish(list(hand.tracks), 8, chunk=chunk)
        answers.append([track.answer for track in hand.tracks.values()])
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == len(prompts)


def test_seed_and_choice_matter_only_where_something_is_drawn() -> None:
    def answer(**changes: Any) -> list[int]:
        hand = Hand(make())
        hand.add("a", [1, 2, 3], replace(SamplingParams(max_tokens=None), **changes))
        hand.finish(["a"], 6)
        return hand.tracks["a"].answer

    drawn = [answer(seed=1), answer(seed=2), answer(seed=1, choice_index=1), answer(temperature=0.0)]
    assert len({tuple(ids) for ids in drawn}) == 4
    assert answer(seed=1) == drawn[0]
    assert answer(temperature=0.0, seed=5, choice_index=2) == drawn[3]


def test_end_tokens_come_now_and_then_but_not_before_min_tokens() -> None:
    hand = Hand(make(eos_every=4, eos_token_ids=[127], vocab_size=128))
    hand.add("a", [1], GREEDY)
    hand.add("b", [1], replace(GREEDY, min_tokens=40))
    hand.finish(["a", "b"], 60)
    assert 127 in hand.tracks["a"].answer[:40]
    assert 127 not in hand.tracks["b"].answer[:40]


def test_options_that_choose_tokens_are_honoured() -> None:
    hand = Hand(make(low=97, high=123, eos_every=0))
    hand.add("plain", [1], GREEDY)
    hand.add("allowed", [1], replace(GREEDY, allowed_token_ids=(3, 5)))
    hand.finish(["plain", "allowed"], 20)
    assert all(97 <= token < 123 for token in hand.tracks["plain"].answer)
    assert set(hand.tracks["allowed"].answer) == {3, 5}


def test_logprobs_are_consistent() -> None:
    hand = Hand(make())
    track = hand.add("a", [7, 8, 9, 10, 11, 12], replace(GREEDY, logprobs=3, prompt_logprobs=2))
    hand.finish(["a"], 4, chunk=4)
    prompt = [entry for result in track.results for entry in result.prompt_logprobs or ()]
    answer = [entry for result in track.results for entry in result.logprobs or ()]
    assert [entry.token_id for entry in prompt] == [8, 9, 10, 11, 12]
    assert [entry.token_id for entry in answer] == track.answer
    assert all(entry.rank == 1 and entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 3 for entry in answer)
    assert all(len(entry.top) == 2 and entry.logprob < 0 for entry in prompt)


def started(**script: Any) -> Hand:
    hand = Hand(make(**script))
    hand.add("a", list(range(10)))
    hand.step({"a": 10})
    return hand


def test_a_foreign_block_is_found() -> None:
    hand = started()
    hand.add("b", [50] * 10)
    hand.step({"b": 10})
    hand.tracks["a"].blocks[1] = hand.tracks["b"].blocks[1]
    hand.tracks["a"].told = 1
    with pytest.raises(KVMismatch, match="a attends block"):
        hand.step({"a": 1})


def test_a_block_with_the_right_tokens_after_another_prefix_is_found() -> None:
    hand = started()
    hand.add("b", [99, *range(1, 10)])
    hand.step({"b": 8})
    hand.tracks["b"].blocks[1], hand.tracks["b"].told = hand.tracks["a"].blocks[1], 1
    with pytest.raises(KVMismatch, match="b attends block"):
        hand.step({"b": 2})


def test_swaps_and_copies_move_what_is_attended() -> None:
    hand = started(swap_space=1)
    blocks = hand.tracks["a"].blocks
    hand.add("b", [60] * 12)
    hand.step({"b": 1}, swap_out=tuple(zip(blocks, (5, 6, 7), strict=True)))
    hand.tracks["b"].blocks = list(blocks)
    hand.tracks["b"].told = hand.tracks["b"].computed = 0
    hand.step({"b": 12})
    moved = [hand.free.pop(0) for _ in blocks]
    away = hand.tracks["a"]
    away.blocks, away.started = [*moved[:2], 200], False
    hand.step({"a": 1}, swap_in=((5, moved[0]), (6, moved[1]), (7, moved[2])), copies=((moved[2], 200),))
    assert len(away.answer) == 2
    away.blocks[0], away.told = blocks[0], 0
    with pytest.raises(KVMismatch):
        hand.step({"a": 1})


def test_two_rows_that_write_one_place_are_found() -> None:
    hand = Hand(make())
    hand.add("a", [1, 2])
    hand.add("b", [1, 3]).blocks = [0]
    hand.tracks["a"].blocks = [0]
    with pytest.raises(KVMismatch, match="where another row of this step writes too"):
        hand.step({"a": 2, "b": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": (77,)}, "other tokens"),
        ({"token_ids": (1,), "start": 11}, "computes positions 11 to 11 of 11"),
        ({"start": 9}, "names its latest sample"),
        ({"block_offset": 9, "new_block_ids": (3,)}, "gets more at index 9"),
        ({"block_offset": 1, "new_block_ids": (3,)}, "has 2 blocks for 11 tokens"),
        ({"start": 8, "token_ids": (8,)}, "samples after position 8"),
    ],
)
def test_rows_that_break_the_contract_are_found(changes: dict[str, Any], message: str) -> None:
    hand = started()
    row = Row(request_id="a", slot=0, start=10, num_tokens=1, token_ids=(), block_offset=3, new_block_ids=(), sample=True)
    with pytest.raises(PlanError, match=message):
        hand.runner.execute(StepPlan(step_id=2, rows=(replace(row, **changes),)))


def test_steps_come_in_order_and_starts_have_tokens() -> None:
    hand = started()
    with pytest.raises(PlanError, match="step 1 came after step 1"):
        hand.runner.execute(StepPlan(step_id=1, rows=()))
    start = SlotStart(request_id="x", slot=0, token_ids=(1,), num_prompt_tokens=2, params=GREEDY, eos_token_ids=())
    with pytest.raises(PlanError, match="x starts with 1 tokens"):
        hand.runner.execute(StepPlan(step_id=2, rows=(), starts=(start,)))


def test_a_raised_step_empties_the_slots_of_its_rows() -> None:
    hand = started(raise_at_step=2)
    hand.add("b", [1])
    with pytest.raises(RuntimeError, match="step 2 raises"):
        hand.step({"a": 1})
    a, b = hand.step({"a": 1, "b": 1})
    assert a.error == LOST_SLOT
    assert b.error is None


def test_a_token_can_make_logits_non_finite() -> None:
    hand = Hand(make(nan_token=66))
    hand.add("bad", [1, 66, 2])
    hand.add("good", [1, 2])
    bad, good = hand.step({"bad": 3, "good": 2})
    assert (bad.error, bad.token_ids) == (NON_FINITE, ())
    assert good.error is None


def test_faults_happen_once_where_asked(tmp_path: Path) -> None:
    script = {"raise_at_step": [1], "once": str(tmp_path / "done")}
    with pytest.raises(RuntimeError, match="step 1 raises"):
        started(**script)
    assert started(**script).tracks["a"].answer


def test_time_passes_as_asked() -> None:
    begin = time.monotonic()
    hand = started(start_seconds=0.05, step_seconds=0.03, token_seconds=0.002)
    assert time.monotonic() - begin >= 0.1
    hand.step({"a": 1})


def test_exit_ends_the_process() -> None:
    code = (
        "from headrace.config import EngineConfig; from headrace.core.messages import StepPlan; from headrace.runner.fake import make\n"
        "make(EngineConfig(model='{\"exit_at_step\": 1}')).execute(StepPlan(step_id=1, rows=()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


def test_hang_hangs() -> None:
    code = (
        "from headrace.config import EngineConfig; from headrace.core.messages import StepPlan; from headrace.runner.fake import make\n"
        "runner = make(EngineConfig(model='{\"hang_at_step\": 1}'))\n"
        "print('ready', flush=True)\n"
        "runner.execute(StepPlan(step_id=1, rows=()))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.kill()


def test_sizes_and_info() -> None:
    runner = make(swap_space=1, num_blocks=9, num_host_blocks=7, max_model_len=33, vocab_size=50)
    info = runner.info(2.0)
    assert (info.num_blocks, info.max_model_len, info.vocab_size, info.block_size, info.load_seconds) == (9, 33, 50, 4, 2.0)
    assert (runner.num_host_blocks, make().num_host_blocks) == (7, 0)
    config = EngineConfig(model="fake", num_gpu_blocks_override=3, max_model_len=20)
    assert FakeRunner(config, FakeScript()).num_blocks == 3
    runner.close()


def test_starts_that_fail() -> None:
    with pytest.raises(StartError, match="no such luck"):
        make(fail_start="no such luck")
    with pytest.raises(ConfigError, match="no setting colour"):
        make(colour=1)


@pytest.mark.parametrize("factory", ["nothing", "no.such.module:make", "headrace.runner.fake:nothing", ":make"])
def test_a_factory_that_is_not_there_is_named(factory: str) -> None:
    with pytest.raises(ConfigError, match="--runner-factory"):
        make_runner(EngineConfig(model="fake", runner_factory=factory))
