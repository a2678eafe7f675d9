"""The time of the loop is divided exactly: a scripted scheduler and runner on a clock that only they move."""

from __future__ import annotations

import pytest

from headrace.core.messages import AddRequest, Row, SampledRow, SchedulerStats, StepPlan, StepResult, TokenOutput
from headrace.core.step_tokens import StepTokens
from headrace.engine.engine_core import EngineCore
from headrace.engine.wire import Add, FromEngine, Heartbeat, Shutdown
from headrace.sampling_params import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """Scheduler and runner in one. Planning takes 1 s, taking a result in 0.5 s; each step is scripted as (seconds before the model, in it,
    after it, tokens by kind, padding, path)."""

    def __init__(self, clock: Clock, steps: list[tuple[float, float, float, StepTokens, int, str] | None]) -> None:
        self.clock, self.script = clock, list(steps)
        self.planned = 0
        self.open = False
        self.step_tokens = StepTokens()
        self.results: list[int] = []

    def add(self, message: AddRequest, now: float) -> TokenOutput | None:
        self.open = True
        return None

    def plan(self, now: float) -> StepPlan | None:
        if not self.open or self.planned == len(self.script) or self.script[self.planned] is None:
            return None
        self.clock.now += 1.0
        self.planned += 1
        row = Row(request_id="a", slot=0, start=0, num_tokens=1, token_ids=(), block_offset=0, new_block_ids=(), sample=True)
        return StepPlan(step_id=self.planned, rows=(row,))

    def execute(self, plan: StepPlan) -> StepResult:
        scripted = self.script[plan.step_id - 1]
        assert scripted is not None
        before, model, after, _, padded, path = scripted
        self.clock.now += before + model + after
        if path == "raises":
            raise RuntimeError("scripted")
        rows = (SampledRow(request_id="a", token_ids=(1,)),)
        return StepResult(step_id=plan.step_id, rows=rows, seconds=before + model + after, model_seconds=model, padded_tokens=padded, path=path)

    def update(self, result: StepResult, now: float) -> list[TokenOutput]:
        self.clock.now += 0.5
        scripted = self.script[result.step_id - 1]
        assert scripted is not None
        self.step_tokens = scripted[3]
        self.open = self.planned < len(self.script)
        return []

    def fail_step(self, plan: StepPlan, message: str) -> list[TokenOutput]:
        self.open = self.planned < len(self.script)
        return []

    def take_outputs(self) -> list[TokenOutput]:
        return []

    def has_work(self) -> bool:
        return self.open

    def stats(self) -> SchedulerStats:
        return SchedulerStats(**dict.fromkeys(SchedulerStats.__slots__, 0))


def divided(steps: list[tuple[float, float, float, StepTokens, int, str] | None]) -> tuple[dict[str, float], float]:
    """Seconds by kind when the script is done, without the next steps planned ahead; and the wall time."""
    clock = Clock()
    scripted = Scripted(clock, steps)
    emitted: list[FromEngine] = []
    core = EngineCore(scripted, scripted, emitted.append, async_scheduling=False, clock=clock)  # type: ignore[arg-type]
    core.post(Add(AddRequest(request_id="a", prompt_token_ids=(1,), params=SamplingParams(max_tokens=9), arrival=0.0)))

    def stop(message: FromEngine) -> None:
        emitted.append(message)
        if isinstance(message, Heartbeat) and not scripted.open and message.step_started is None:
            core.post(Shutdown())

    core._emit = stop
    core.run()
    last = [message for message in emitted if isinstance(message, Heartbeat)][-1]
    return last.work.seconds, last.at - 100.0


def test_every_part_is_exact():
    seconds, wall = divided(
        [
            (0.25, 4.0, 0.25, StepTokens(useful=6, recompute=2), 0, "ready"),
            (0.5, 8.0, 0.0, StepTokens(useful=3, speculation=4, discarded=1), 8, "decode-16"),
        ]
    )
    host = 2 * 1.0 + 2 * 0.5 + 0.5 + 0.5  # planning, taking in, around the model
    expected = {"useful": 3.0 + 1.5, "recompute": 1.0, "padding": 4.0, "speculation": 2.0, "discarded": 0.5, "host": host}
    assert {kind: value for kind, value in seconds.items() if value} == pytest.approx(expected)
    assert sum(seconds.values()) == pytest.approx(wall)


def test_a_step_that_raises_is_discarded():
    seconds, wall = divided([(0.5, 2.0, 0.0, StepTokens(), 0, "raises"), (0.0, 1.0, 0.0, StepTokens(useful=1), 0, "ready")])
    assert {kind: value for kind, value in seconds.items() if value} == pytest.approx({"discarded": 2.5, "useful": 1.0, "host": 2.5})
    assert sum(seconds.values()) == pytest.approx(wall)
