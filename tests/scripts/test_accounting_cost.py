from __future__ import annotations

from headrace.core import admission, scheduler
from headrace.engine import engine_core
from headrace.observe.work import WorkLedger
from tests.scripts.load_script import load_script

accounting_cost = load_script("accounting_cost")


def test_off_is_really_off_and_only_within():
    with accounting_cost.accounting(False):
        assert engine_core.WorkLedger is accounting_cost.NoLedger
        assert admission.PrefixMisses is accounting_cost.NoMisses
        assert scheduler.tokens_of(None, None) == accounting_cost.StepTokens()
    with accounting_cost.accounting(True):
        assert engine_core.WorkLedger is WorkLedger


def test_pairs_do_the_same_work_in_turn():
    orders = []
    pairs = accounting_cost.in_pairs(2, lambda on, number: orders.append((number, on)) or on)
    assert orders == [(0, False), (0, True), (1, True), (1, False), (2, False), (2, True)]
    assert pairs == [(True, False)] * 2
    loop = accounting_cost.loop_pairs(1, 5)
    ((on, off),) = loop
    assert on.tokens == off.tokens == 16 * 5
    assert on.steps == off.steps
    assert accounting_cost.report(loop, []).startswith("loop: ")


def test_the_report():
    def cost(tokens: int, seconds: float, loop_seconds: float) -> object:
        return accounting_cost.Cost(tokens=tokens, steps=100, seconds=seconds, loop_seconds=loop_seconds)

    pair = (cost(1000, 10.0, 0.02), cost(1000, 9.9, 0.01))
    text = accounting_cost.report([pair] * 3, [pair] * 3)
    assert "loop: 100.0 us a step" in text
    assert "100 tokens/s with, 101 without: ratio 0.9900 (0.9900 to 0.9900, 3 pairs)" in text
    assert "cost: 0.1010% of a step of 99.0 ms" in text
