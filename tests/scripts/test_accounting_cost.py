from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.messages import StepPlan
from headrace.core.step_work import StepWork
from headrace.engine import engine_core
from headrace.observe.work import WorkLedger
from tests.scripts.load_script import load_script

accounting_cost = load_script("accounting_cost")


def test_off_is_really_off_and_only_within():
    switch = accounting_cost.Switch()
    with switch.installed():
        ledger = engine_core.WorkLedger(0.0)
        ledger.pass_between("idle", 1.0)
        switch.on = False
        ledger.pass_between("idle", 5.0)
        ledger.add_step(1.0, path="ready", model_seconds=1.0, tokens={"useful": 1})
        assert ledger.snapshot().seconds["idle"] == 0.0
        switch.on = True
        assert ledger.snapshot().seconds["idle"] == 1.0
        assert not ledger.snapshot().paths
    assert engine_core.WorkLedger is WorkLedger


def test_pairs_of_the_loop_do_the_same_work():
    pairs = accounting_cost.loop_pairs(2, 5)
    assert len(pairs) == 2
    for on, off in pairs:
        assert (on.tokens, on.steps) == (off.tokens, off.steps) == (16 * 5, on.steps)
    assert accounting_cost.loop_report(pairs).startswith("loop: ")


def steps(count: int, cost: float) -> list[Any]:
    """Decodes and, every third step, a prompt's tokens too; those with the accounting take so much longer."""
    found = []
    for number in range(count):
        on, prompt = number % 4 in (0, 3), 64 * (number % 3 == 0)
        seconds = (0.01 + 0.0001 * prompt) * (1.0 + cost * on)
        work = StepWork(16, 160, prompt, prompt * prompt, 16 + bool(prompt))
        found.append(accounting_cost.Step(on=on, work=work, wall=seconds, process=2 * seconds, loop=0.001 + 0.00003 * on))
    return found


def test_the_order_in_a_pair_goes_by_lot():
    switch, seen = accounting_cost.Switch(), []
    runner = accounting_cost.SwitchingRunner(SimpleNamespace(execute=lambda plan: seen.append(switch.on)), switch)
    for _ in range(41):
        runner.execute(StepPlan(step_id=1, rows=()))
    assert all(one is not other for one, other in zip(seen[:40:2], seen[1::2], strict=True))
    assert 5 < sum(seen[:40:2]) < 15
    assert [step.on for step in runner.steps()] == seen[:40]


def test_steps_of_other_shapes_are_pairs_as_well():
    pairs = accounting_cost.relative(steps(48, 0.05), "wall")
    assert len(pairs) == 24
    assert accounting_cost.throughput(pairs) == pytest.approx((1 / 1.05,) * 3, abs=0.002)


def test_steps_that_sleep():
    found = accounting_cost.sleeping_steps(8)
    assert {step.on for step in found} == {True, False}
    assert all(step.wall >= 0.002 and step.process >= 0.0 for step in found)


def test_the_report_of_steps():
    text, most = accounting_cost.step_report("model", steps(200, 0.0))
    assert "30 us a step (95 %: 30 to 30), 0.30% of it" in text
    assert "processor time: 1.0000 of that without (95 %: 1.0000 to 1.0000)" in text
    assert most == pytest.approx(0.003)
