from __future__ import annotations

from types import SimpleNamespace

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


def test_neighbouring_steps_of_the_same_size_are_pairs():
    switch = accounting_cost.Switch()
    runner = accounting_cost.SwitchingRunner(SimpleNamespace(), switch)
    alike, other = (16, 16), (16, 40)
    runner.steps = [(0.0, True, alike), (1.0, False, alike), (3.0, False, alike), (6.0, True, alike)]
    runner.steps += [(10.0, True, alike), (15.0, False, other), (21.0, False, alike)]
    assert runner.pairs() == [(1.0, 2.0), (4.0, 3.0)]


def test_the_order_changes_from_pair_to_pair():
    switch, seen = accounting_cost.Switch(), []
    runner = accounting_cost.SwitchingRunner(SimpleNamespace(execute=lambda plan: seen.append(switch.on)), switch)
    for _ in range(6):
        runner.execute(SimpleNamespace(rows=(), num_tokens=0))
    assert seen == [True, False, False, True, True, False]


def test_the_report_of_the_model():
    text = accounting_cost.model_report([(0.101, 0.1)] * 50)
    assert text == "model: throughput with accounting 0.9901 of that without (95 %: 0.9901 to 0.9901), 50 pairs of steps of 100.0 ms"
