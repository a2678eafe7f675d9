"""The loop alone, see `core_bench`."""

import time

import pytest

from headrace.core.messages import AbortRequest
from headrace.engine import engine_core
from headrace.engine.engine_core import EngineBroken
from headrace.engine.wire import Abort, Outputs, Shutdown
from tests.engine.core_bench import Bench, CountingScheduler, HeldRunner, running
from tests.patience import LIMIT_S, until


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_every_request_gets_all_its_tokens_and_one_end(async_scheduling):
    with running(async_scheduling=async_scheduling) as bench:
        wanted = {f"r{i}": i % 7 + 1 for i in range(40)}
        for name, count in wanted.items():
            bench.add(name, count)
        until(lambda: len(bench.ends()) == len(wanted))
        outputs = bench.outputs()
        assert {name: sum(len(o.token_ids) for o in outputs if o.request_id == name) for name in wanted} == wanted
        assert sum(output.finish_reason is not None for output in outputs) == len(wanted)


def test_the_next_step_is_planned_while_one_runs():
    with running(held=True) as bench:
        bench.add("a", 3)
        until(lambda: bench.scheduler.log == ["plan 1", "plan 2"])
        assert bench.runner.begun == [1]
        bench.runner.permits.release()
        until(lambda: bench.runner.begun == [1, 2])
        until(lambda: bench.scheduler.log[2:] == ["update 1", "plan 3"])


def test_without_async_scheduling_a_step_is_planned_when_the_last_one_is_known():
    with running(held=True, async_scheduling=False) as bench:
        bench.add("a", 2)
        until(lambda: bench.runner.begun == [1])
        time.sleep(0.05)
        assert bench.scheduler.log == ["plan 1"]
        bench.runner.permits.release()
        until(lambda: bench.scheduler.log == ["plan 1", "update 1", "plan 2"])


def test_outputs_of_a_step_leave_in_one_frame():
    with running({f"r{i}": 2 for i in range(5)}, held=True) as bench:
        until(lambda: len(bench.runner.begun) == 1)
        bench.runner.permits.release(5)
        until(lambda: len(bench.ends()) == 5)
    frames = [message for message in bench.emitted if isinstance(message, Outputs)]
    assert all(len({output.token_ids for output in frame.outputs}) == 1 for frame in frames)
    assert max(len(frame.outputs) for frame in frames) >= 4


def test_an_idle_loop_sleeps(monkeypatch):
    monkeypatch.setattr(engine_core, "HEARTBEAT_S", 0.01)
    with running() as bench:
        bench.add("a", 2)
        until(lambda: bench.inbox.resting and bench.heartbeats()[-1:] and bench.heartbeats()[-1].steps_total == 2)
        turns = []
        bench.scheduler.has_work = lambda: turns.append(1)
        time.sleep(0.2)
        assert not turns
        beats = len(bench.heartbeats())
        assert bench.heartbeats()[-1].step_started is None
        time.sleep(0.1)
        assert len(bench.heartbeats()) == beats
        del bench.scheduler.has_work


def test_a_long_step_is_told_by_heartbeats(monkeypatch):
    monkeypatch.setattr(engine_core, "HEARTBEAT_S", 0.02)
    with running(held=True) as bench:
        begin = time.monotonic()
        bench.add("a", 1)
        until(lambda: len([beat for beat in bench.heartbeats() if beat.step_started is not None]) >= 3)
        starts = {beat.step_started for beat in bench.heartbeats() if beat.step_started is not None}
        assert len(starts) == 1
        assert begin <= starts.pop() <= time.monotonic()
        bench.runner.permits.release()
        until(lambda: bench.heartbeats()[-1].step_started is None)
        assert bench.heartbeats()[-1].steps_total == 1
        assert bench.heartbeats()[-1].step_seconds_total >= 0.02


def test_heartbeats_tell_idle_time_from_work(monkeypatch):
    monkeypatch.setattr(engine_core, "HEARTBEAT_S", 0.02)
    begin = time.monotonic()
    with running(held=True) as bench:
        until(lambda: bench.inbox.resting)
        bench.ahead = 5.0
        bench.add("a", 1)
        until(lambda: len([beat for beat in bench.heartbeats() if beat.step_started is not None]) >= 2)
        first, second = [beat for beat in bench.heartbeats() if beat.step_started is not None][:2]
        assert 5.0 <= first.work.between["idle"] <= first.at - begin
        assert second.work.between["idle"] == first.work.between["idle"], "a step is no idle time"
        assert begin + 5.0 < first.at < second.at <= time.monotonic() + 5.0
        bench.runner.permits.release()


def test_the_engine_is_at_rest_once_after_its_steps(monkeypatch):
    monkeypatch.setattr(engine_core, "REST_S", 0.05)
    with running() as bench:
        time.sleep(0.2)
        assert bench.rests == [], "nothing has been done yet"
        for count in (1, 2):
            bench.add(f"request-{count}", 3)
            until(lambda count=count: len(bench.rests) == count)
            time.sleep(0.2)
            assert bench.rests == [3, 6][:count], "after the last step, and once"
    beats = bench.heartbeats()
    assert beats[-1].work.between["idle"] >= 0.5, "rest is idle time too"


def test_no_rest_while_a_step_runs(monkeypatch):
    monkeypatch.setattr(engine_core, "REST_S", 0.01)
    monkeypatch.setattr(engine_core, "HEARTBEAT_S", 0.01)
    with running(held=True) as bench:
        bench.add("a", 2)
        until(lambda: len(bench.heartbeats()) >= 5)
        assert bench.rests == []
        bench.runner.permits.release(10)
        until(lambda: bench.rests)


def test_heartbeats_are_few():
    with running() as bench:
        begin = time.monotonic()
        bench.add("a", 3000)
        until(lambda: bench.ends())
        seconds = time.monotonic() - begin
    assert len(bench.heartbeats()) <= seconds / engine_core.HEARTBEAT_S + 4  # at start, at rest, and at the stop


def test_an_abort_is_handled_while_a_step_runs():
    with running(held=True) as bench:
        bench.add("a", 10)
        until(lambda: bench.runner.begun == [1])
        bench.core.post(Abort(AbortRequest(request_id="a")))
        until(lambda: bench.ends() == {"a": "abort"})
        assert bench.runner.begun == [1]
        bench.runner.permits.release(5)
        until(lambda: bench.heartbeats()[-1].step_started is None)
        assert bench.ends() == {"a": "abort"}
        assert [output.token_ids for output in bench.outputs()] == [()]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3)])
def test_a_step_that_raises_ends_its_requests_alone(async_scheduling, error, caplog):
    with running({"a": 5, "b": 5}, held=True, async_scheduling=async_scheduling) as bench:
        bench.runner.errors[2] = error
        until(lambda: bench.runner.begun == [1])
        bench.runner.permits.release(2)
        until(lambda: bench.ends() == {"a": "error", "b": "error"})
        assert type(error).__name__ in bench.outputs()[-1].error_message
        bench.add("c", 2)
        bench.runner.permits.release(10)
        until(lambda: bench.ends().get("c") == "length")
        assert not bench.scheduler.outstanding
        assert 3 not in bench.runner.begun or not async_scheduling  # what was planned behind the failed step never runs
    assert "failed" in caplog.text
    assert bench.error is None


def test_steps_that_keep_failing_end_the_engine(caplog):
    bench = Bench(CountingScheduler(), HeldRunner(), async_scheduling=False)
    bench.runner.errors = {step: RuntimeError(f"broken {step}") for step in (1, 2, 4, 5, 6)}  # two in a row are forgiven
    bench.thread.start()
    for i in range(6):
        bench.add(f"r{i}", 1)
        until(lambda i=i: f"r{i}" in bench.ends())
    bench.thread.join(LIMIT_S)
    assert bench.ends() == {f"r{i}": "length" if i == 2 else "error" for i in range(6)}
    assert isinstance(bench.error, EngineBroken)
    assert "broken 6" in str(bench.error)


def test_a_refusal_says_when_to_come_back():
    with running(held=True, queue_size=1) as bench:
        bench.add("a", 1)
        bench.add("b", 1)
        until(lambda: "b" in bench.ends())
        frame = next(message for message in bench.emitted if isinstance(message, Outputs))
        assert (frame.outputs[0].error_code, frame.retry_after) == ("queue_full", 7)
        bench.runner.permits.release()
        until(lambda: "a" in bench.ends())
        last = [message for message in bench.emitted if isinstance(message, Outputs)][-1]
        assert last.retry_after is None


def test_what_planning_ends_is_sent_at_once():
    with running(held=True) as bench:
        bench.add("late", 1)
        until(lambda: bench.ends() == {"late": "error"})
        bench.add("a", 1)
        bench.add("late too", 1)
        until(lambda: bench.ends() == {"late": "error", "late too": "error"})


def test_shutdown_waits_for_the_running_step_only():
    with running(held=True) as bench:
        bench.add("a", 100)
        until(lambda: bench.runner.begun == [1])
        bench.core.post(Shutdown())
        time.sleep(0.02)
        assert bench.thread.is_alive()
        bench.runner.permits.release(100)
        bench.thread.join(LIMIT_S)
        assert bench.runner.begun == [1]


def test_a_fault_of_the_scheduler_ends_the_loop():
    """Its state is unknown then: the process must go."""
    bench = Bench(CountingScheduler(), HeldRunner(), async_scheduling=True)
    bench.scheduler.update = lambda result, now: 1 / 0
    bench.thread.start()
    bench.add("a", 1)
    bench.thread.join(LIMIT_S)
    assert isinstance(bench.error, ZeroDivisionError)
