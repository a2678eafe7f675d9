"""Every second is put into one kind, and nothing is lost on the way."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry

from headrace.observe.remarks import remarks
from headrace.observe.work import KINDS, TOKEN_KINDS, WORDS, PathWork, Work, WorkLedger, plus, since
from headrace.observe.work_metrics import WorkMetrics


def test_every_kind_is_explained():
    assert set(WORDS) == set(KINDS)


def test_a_step_is_divided_by_its_tokens():
    ledger = WorkLedger(10.0)
    ledger.pass_between("idle", 14.0)
    seconds = ledger.lap(18.0)
    ledger.add_step(seconds, path="decode-16", model_seconds=3.2, tokens={"useful": 9, "padding": 5, "recompute": 1, "speculation": 1})
    work = ledger.snapshot()
    assert work.between == {"host": 0.0, "waiting": 0.0, "idle": 4.0}
    path = work.paths["decode-16"]
    assert (path.steps, path.tokens["padding"], path.tokens["discarded"]) == (1, 5, 0)
    assert path.seconds == pytest.approx(
        {"useful": 1.8, "padding": 1.0, "recompute": 0.2, "speculation": 0.2, "discarded": 0.0, "compile": 0.0, "host": 0.8}
    )
    assert sum(work.seconds.values()) == pytest.approx(8.0)


def test_a_compilation_and_a_step_without_tokens():
    ledger = WorkLedger(0.0)
    ledger.add_step(ledger.lap(5.0), path="ready", model_seconds=4.0, tokens={"useful": 3}, compiled=True)
    ledger.add_step(ledger.lap(6.0), path="ready", model_seconds=0.0, tokens={})
    seconds = ledger.snapshot().seconds
    assert (seconds["compile"], seconds["useful"], seconds["host"]) == (4.0, 0.0, 2.0)


def test_a_clock_that_steps_back_and_a_model_longer_than_its_step():
    ledger = WorkLedger(5.0)
    assert ledger.lap(3.0) == 0.0
    assert ledger.lap(6.0) == 1.0, "time is not given away twice"
    ledger.add_step(1.0, path="ready", model_seconds=2.0, tokens={"useful": 1})
    assert ledger.snapshot().seconds["useful"] == 1.0


def test_a_snapshot_stays_as_it_is():
    ledger = WorkLedger(0.0)
    ledger.add_step(1.0, path="ready", model_seconds=1.0, tokens={"useful": 1})
    before = ledger.snapshot()
    ledger.add_step(2.0, path="ready", model_seconds=2.0, tokens={"useful": 1})
    ledger.add_step(4.0, path="decode-4", model_seconds=4.0, tokens={"useful": 2, "padding": 2})
    ledger.pass_between("waiting", 3.0)
    assert before.seconds["useful"] == 1.0
    change = since(before, ledger.snapshot())
    assert change.paths["ready"].seconds["useful"] == 2.0
    assert change.paths["decode-4"].tokens["padding"] == 2
    assert change.between["waiting"] == 3.0
    assert plus(before, change) == ledger.snapshot()


def test_the_parts_are_the_whole():
    chance = random.Random(1)
    ledger, now = WorkLedger(0.0), 0.0
    for _ in range(1000):
        now += chance.expovariate(10)
        if chance.random() < 0.3:
            ledger.pass_between(chance.choice(("host", "waiting", "idle")), now)
        else:
            tokens = {kind: chance.randrange(5) for kind in TOKEN_KINDS}
            ledger.add_step(
                ledger.lap(now), path=chance.choice("ab"), model_seconds=chance.expovariate(10), tokens=tokens, compiled=chance.random() < 0.1
            )
    assert sum(ledger.snapshot().seconds.values()) == pytest.approx(now, rel=1e-9)


def work_of(
    name: str = "ready", steps: int = 1, tokens: dict[str, int] | None = None, between: dict[str, float] | None = None, **seconds: float
) -> Work:
    path = PathWork(steps=steps)
    path.seconds |= seconds
    path.tokens |= tokens or {}
    return Work(paths={name: path}, between={"host": 0.0, "waiting": 0.0, "idle": 0.0} | (between or {}))


def test_padding_is_called_by_its_name():
    work = work_of("decode-16", steps=10, tokens={"useful": 92, "padding": 68}, useful=5.0, padding=4.0, host=0.5)
    (remark,) = remarks(work)
    assert (remark.kind, round(remark.share, 3)) == ("padding", 0.421)
    assert remark.text == "42% of busy time is padding: decode-16 runs with 9.2 of its 16 places; steps of 10 would do."


@pytest.mark.parametrize(
    ("seconds", "between", "kind"),
    [
        ({"useful": 9.0, "recompute": 1.0}, {}, "recompute"),
        ({"useful": 8.0, "speculation": 2.0}, {}, "speculation"),
        ({"useful": 9.0, "discarded": 1.0}, {}, "discarded"),
        ({"useful": 7.0, "host": 2.0}, {"host": 1.0}, "host"),
        ({"useful": 9.0, "compile": 1.0}, {}, "compile"),
        ({"useful": 9.0}, {"waiting": 1.0}, "waiting"),
    ],
)
def test_each_fault_has_its_words(seconds: dict[str, float], between: dict[str, float], kind: str):
    (remark,) = remarks(work_of(between=between, **seconds))
    assert remark.kind == kind
    assert remark.share == pytest.approx(0.1 if kind != "host" and kind != "speculation" else 0.3 if kind == "host" else 0.2)


def test_a_healthy_or_an_idle_engine_is_left_alone():
    assert remarks(work_of(useful=95.0, padding=2.0, host=3.0, between={"idle": 900.0})) == []
    assert remarks(work_of(useful=0.1, host=0.5, between={"idle": 900.0})) == [], "too little to say anything"


def test_the_worst_comes_first():
    found = remarks(work_of(useful=5.0, host=2.5, discarded=2.0, recompute=0.5))
    assert [remark.kind for remark in found] == ["host", "discarded", "recompute"]


def values(metrics: WorkMetrics, name: str) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return {tuple(sample.labels.values()): sample.value for family in registry.collect() for sample in family.samples if sample.name == name}


def test_totals_go_on_over_a_restart_of_the_engine():
    metrics = WorkMetrics()
    assert values(metrics, "headrace_work_seconds_total") == {(kind,): 0.0 for kind in KINDS}
    assert ("ready", "useful") in values(metrics, "headrace_path_seconds_total")
    metrics.update(work_of("decode-4", useful=3.0, between={"idle": 5.0}), restarts=0)
    metrics.update(work_of("decode-4", useful=4.0, between={"idle": 6.0}), restarts=0)
    assert values(metrics, "headrace_work_seconds_total")["useful",] == 4.0
    metrics.update(work_of("ready", useful=1.0, between={"idle": 0.5}, tokens={"useful": 7}), restarts=1)
    metrics.update(work_of("ready", useful=1.5, between={"idle": 0.5}, tokens={"useful": 8}), restarts=1)
    seconds = values(metrics, "headrace_work_seconds_total")
    assert (seconds["useful",], seconds["idle",]) == (5.5, 6.5)
    assert values(metrics, "headrace_path_seconds_total")["decode-4", "useful"] == 4.0
    assert values(metrics, "headrace_path_tokens_total")["ready", "useful"] == 8


def test_a_new_engine_that_has_more_of_everything_is_a_new_one():
    metrics = WorkMetrics()
    metrics.update(work_of(useful=1.0, between={"idle": 1.0}), restarts=0)
    metrics.update(work_of(useful=5.0, between={"idle": 9.0}), restarts=1)
    seconds = values(metrics, "headrace_work_seconds_total")
    assert (seconds["useful",], seconds["idle",]) == (6.0, 10.0)
