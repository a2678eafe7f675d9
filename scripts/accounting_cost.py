#!/usr/bin/env python3
"""What it costs that the engine divides its time into kinds: the same work with the accounting and without it, in turn.

    python scripts/accounting_cost.py
    python scripts/accounting_cost.py --requests 64 --loop-pairs 31

First the engine's loop alone, with a runner that computes nothing: pairs of runs, and what a step's bookkeeping takes in processor time with
and without. Then steps that sleep, and a model under the load of a busy service (prompts lognormal 32-512 around 128, answers 16-256 around 64, 16 at
a time): here the accounting goes on and off from step to step, by lot, and neighbouring steps are pairs, so that other work on the machine meets both
alike. Of each step three times are taken: the wall's, the processor time of the whole process, which other processes do not add to, and that of the
loop's thread, in which all of the accounting is. The first two are divided by what steps with as many decodes and prompt tokens take (as `headrace
plan` fits them), so that every pair counts. Medians of pairs, and where they lie in 95 of 100 samples of the pairs.

Without: the ledger, the sorting of a step's tokens and the causes of prefix misses do nothing, in this process alone. What stands after `--` are
flags of `headrace serve`; the default is `--quantization gguf --max-model-len 2048`. The exit status is 1 where the model's pairs do not show that
the accounting takes less than 1 % of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from headrace.cli.options import ENGINE_GROUPS, add_options
from headrace.cli.settings import engine_options
from headrace.config import EngineConfig
from headrace.core import admission, scheduler, step_tokens
from headrace.core.draft import PlannedStep
from headrace.core.messages import AddRequest, StepPlan, StepResult
from headrace.core.prefix_misses import PrefixMisses
from headrace.core.scheduler import Scheduler
from headrace.core.step_tokens import StepTokens
from headrace.core.step_work import StepWork
from headrace.engine import engine_core
from headrace.engine.async_llm import make_engine_config
from headrace.engine.engine_core import EngineCore
from headrace.engine.engine_host import scheduler_config
from headrace.engine.wire import Add, FromEngine, Outputs, Shutdown, encode_frame
from headrace.observe.work import Work, WorkLedger
from headrace.plan.costs import Sample, fit
from headrace.runner.fake import FakeRunner, FakeScript
from headrace.sampling_params import SamplingParams

BATCH = 16
MOST = 0.01  # of a step


class Switch:
    """Whether the accounting is on: of all that is made within `installed`, from then on."""

    def __init__(self) -> None:
        self.on = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        switch, nothing, tokens_of = self, StepTokens(), step_tokens.tokens_of

        class SwitchedLedger(WorkLedger):
            def snapshot(self) -> Work:
                return super().snapshot() if switch.on else Work()

            def lap(self, now: float) -> float:
                return super().lap(now) if switch.on else 0.0

            def pass_between(self, kind: str, now: float) -> None:
                if switch.on:
                    super().pass_between(kind, now)

            def add_step(self, seconds: float, **what: Any) -> None:
                if switch.on:
                    super().add_step(seconds, **what)

        class SwitchedMisses(PrefixMisses):
            def note(self, *tokens: Any, **what: Any) -> None:
                if switch.on:
                    super().note(*tokens, **what)

        def switched_tokens_of(step: PlannedStep, result: StepResult) -> StepTokens:
            return tokens_of(step, result) if switch.on else nothing

        with (
            mock.patch.object(engine_core, "WorkLedger", SwitchedLedger),
            mock.patch.object(admission, "PrefixMisses", SwitchedMisses),
            mock.patch.object(scheduler, "tokens_of", switched_tokens_of),
        ):
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    tokens: int
    steps: int
    loop_seconds: float  # processor time of the loop's thread


def run(runner: Any, config: EngineConfig, requests: Sequence[AddRequest], switch: Switch) -> Cost:
    """All requests, `max_num_seqs` at a time, on an engine's loop of their own."""
    tokens = ended = steps = 0

    def emit(message: FromEngine) -> None:
        nonlocal tokens, ended, steps
        encode_frame(message)
        if isinstance(message, Outputs):
            steps += 1
            for output in message.outputs:
                tokens += len(output.token_ids)
                ended += output.finish_reason is not None
            if ended == len(requests):
                core.post(Shutdown())

    with switch.installed():
        core = EngineCore(runner, Scheduler(scheduler_config(config, runner.info(0.0), num_host_blocks=0)), emit)
        for request in requests:
            core.post(Add(request))
        cpu = time.thread_time()
        core.run()
        return Cost(tokens=tokens, steps=steps, loop_seconds=time.thread_time() - cpu)


def lognormal(rng: random.Random, median: int, low: int, high: int) -> int:
    return min(high, max(low, round(rng.lognormvariate(0, 0.8) * median)))


def busy_service(count: int, seed: int) -> list[AddRequest]:
    rng = random.Random(seed)
    return [
        request(f"r{seed}-{i}", [rng.randrange(100, 10_000) for _ in range(lognormal(rng, 128, 32, 512))], lognormal(rng, 64, 16, 256))
        for i in range(count)
    ]


def request(name: str, prompt: Sequence[int], max_tokens: int) -> AddRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params, arrival=0.0)


def loop_pairs(count: int, num_steps: int) -> list[tuple[Cost, Cost]]:
    """(with, without), each time in the other order, after one pair to warm up."""
    config = EngineConfig(model="", max_num_seqs=BATCH, max_model_len=1024, num_gpu_blocks_override=2048)
    pairs = []
    for number in range(count + 1):
        costs = {}
        for on in (True, False) if number % 2 else (False, True):
            switch = Switch()
            switch.on = on
            requests = [request(f"r{i}", [i + 2, 3, 4], num_steps) for i in range(BATCH)]
            costs[on] = run(FakeRunner(config, FakeScript(vocab_size=1000)), config, requests, switch)
        pairs.append((costs[True], costs[False]))
    return pairs[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds are from its begin to that of the next one."""

    on: bool
    work: StepWork
    wall: float
    process: float  # processor time of all threads
    loop: float  # of the loop's


Pair = tuple[float, float]  # with and without


class SwitchingRunner:
    """A runner that puts the switch on for one step of each pair, by lot the first or the second, and notes when each step began."""

    def __init__(self, runner: Any, switch: Switch) -> None:
        self._runner = runner
        self._switch = switch
        self._lots = random.Random(1)
        self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())  # it is made in the loop's thread
        self._begins: list[tuple[bool, StepWork, float, float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        first = len(self._begins) % 2 == 0
        self._switch.on = self._lots.random() < 0.5 if first else not self._switch.on  # the loop works in the shadow of this step
        times = time.perf_counter(), time.process_time(), time.clock_gettime(self._loop_clock)
        self._begins.append((self._switch.on, plan.work, *times))
        result: StepResult = self._runner.execute(plan)
        return result

    def steps(self) -> list[Step]:
        return [
            Step(on=on, work=work, wall=later[2] - wall, process=later[3] - process, loop=later[4] - loop)
            for (on, work, wall, process, loop), later in itertools.pairwise(self._begins)
        ]


def pairs_of(steps: Sequence[Step], value: Callable[[Step], float]) -> list[Pair]:
    """Of neighbours: the first with the second, the third with the fourth."""
    found = []
    for one, other in zip(steps[::2], steps[1::2], strict=False):
        on, off = (one, other) if one.on else (other, one)
        found.append((value(on), value(off)))
    return found


def relative(steps: Sequence[Step], name: str) -> list[Pair]:
    """Of neighbours their wall or process time, divided by what steps of their shape take."""
    samples = [Sample(step.work, getattr(step, name)) for step in steps]
    fitted = fit(samples, noise=None)
    return pairs_of(steps, lambda step: float(getattr(step, name)) / fitted.seconds(step.work))


def model_steps(num_requests: int, flags: Sequence[str]) -> list[Step]:
    from headrace.runner.model_runner import ModelRunner

    parser = argparse.ArgumentParser(prog="accounting_cost.py -- ...")
    add_options(parser, ENGINE_GROUPS)
    parser.add_argument("--model")
    settings = {name.replace("_", "-"): value for name, value in vars(parser.parse_args(flags)).items()}
    settings["max-num-seqs"] = BATCH
    config = make_engine_config(settings.pop("model", None), engine_options(settings))
    switch = Switch()
    runner = SwitchingRunner(ModelRunner(config), switch)
    try:
        run(runner, config, busy_service(num_requests, 0), switch)
    finally:
        runner.close()
    return runner.steps()


def loop_report(pairs: Sequence[tuple[Cost, Cost]]) -> str:
    per_step = sorted(1e6 * (on.loop_seconds / on.steps - off.loop_seconds / off.steps) for on, off in pairs)
    low, middle, high = statistics.quantiles(per_step, n=4)
    return f"loop: {middle:.1f} us of a step (quarters {low:.1f} to {high:.1f}), {len(pairs)} pairs of {pairs[0][0].steps} steps of {BATCH} rows"


def sleeping_steps(num_steps: int) -> list[Step]:
    """Steps that sleep for 2 ms and compute nothing."""
    config = EngineConfig(model="", max_num_seqs=BATCH, max_model_len=2048, num_gpu_blocks_override=4096)
    switch = Switch()
    runner = SwitchingRunner(FakeRunner(config, FakeScript(vocab_size=1000, step_seconds=0.002)), switch)
    run(runner, config, [request(f"r{i}", [i + 2, 3, 4], num_steps) for i in range(BATCH)], switch)
    return runner.steps()


def middle(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """The median, and where it lies in 95 of 100 samples of the values."""
    rng = random.Random(seed)
    samples = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(1000))
    return statistics.median(values), samples[25], samples[974]


def throughput(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """With accounting, of that without (1: it costs nothing); see `middle`."""
    return middle([off / on for on, off in pairs])


def step_report(name: str, steps: Sequence[Step]) -> tuple[str, float]:
    """Words, and the most of a step that the accounting takes by these pairs, in the loop's thread."""
    step = statistics.median(step.wall for step in steps)
    process = statistics.median(step.process for step in steps)
    own, low, high = middle([on - off for on, off in pairs_of(steps, lambda step: step.loop)])
    lines = [f"{name}: {len(steps) // 2} pairs of neighbouring steps of {1e3 * step:.1f} ms ({1e3 * process:.1f} ms of processor time)"]
    lines.append(f"  the loop's thread: {1e6 * own:.0f} us a step (95 %: {1e6 * low:.0f} to {1e6 * high:.0f}), {own / step:.2%} of it")
    for what, words in (("process", "throughput by processor time"), ("wall", "throughput by the wall's")):
        lines.append("  {}: {:.4f} of that without (95 %: {:.4f} to {:.4f})".format(words, *throughput(relative(steps, what))))
    return "\n".join(lines), high / step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=160, help="of the run with a model; 0: none")
    parser.add_argument("--loop-pairs", type=int, default=31)
    parser.add_argument("--loop-steps", type=int, default=400)
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    options = parser.parse_args()
    flags = options.flags or ["--quantization", "gguf", "--max-model-len", "2048"]
    print(loop_report(loop_pairs(options.loop_pairs, options.loop_steps)), flush=True)
    print(step_report("steps that sleep", sleeping_steps(3 * options.loop_steps))[0], flush=True)
    if not options.requests:
        return 0
    words, most = step_report("model", model_steps(options.requests, flags))
    print(words)
    return int(most >= MOST)


if __name__ == "__main__":
    raise SystemExit(main())
