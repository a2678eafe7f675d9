#!/usr/bin/env python3
"""What it costs that the engine divides its time into kinds: the same work with the accounting and without it, in turn.

    python scripts/accounting_cost.py
    python scripts/accounting_cost.py --requests 64 --loop-pairs 31

First the engine's loop alone, with a runner that computes nothing: pairs of runs, and what a step's bookkeeping takes in processor time with
and without. Then a model under the load of a busy service (prompts lognormal 32-512 around 128, answers 16-256 around 64, 16 at a time), where
the accounting goes on and off from step to step: pairs of neighbouring steps of the same size, so that other work on the machine meets both
alike. Without: the ledger, the sorting of a step's tokens and the causes of prefix misses do nothing, in this process alone. What stands after
`--` are flags of `headrace serve`; the default is `--quantization gguf --max-model-len 2048`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
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
from headrace.engine import engine_core
from headrace.engine.async_llm import make_engine_config
from headrace.engine.engine_core import EngineCore
from headrace.engine.engine_host import scheduler_config
from headrace.engine.wire import Add, FromEngine, Outputs, Shutdown, encode_frame
from headrace.observe.work import Work, WorkLedger
from headrace.runner.fake import FakeRunner, FakeScript
from headrace.sampling_params import SamplingParams

BATCH = 16


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


class SwitchingRunner:
    """A runner that puts the switch on, off, off, on, ... from step to step, and notes when each step began."""

    def __init__(self, runner: Any, switch: Switch) -> None:
        self._runner = runner
        self._switch = switch
        self.steps: list[tuple[float, bool, tuple[int, int]]] = []  # begin, whether on, rows and tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        self._switch.on = len(self.steps) % 4 in (0, 3)  # the loop works in the shadow of this step
        self.steps.append((time.perf_counter(), self._switch.on, (len(plan.rows), plan.num_tokens)))
        result: StepResult = self._runner.execute(plan)
        return result

    def pairs(self) -> list[tuple[float, float]]:
        """Seconds from step to step, (with, without), of neighbours that are alike."""
        found = []
        for first, second, after in zip(self.steps[::2], self.steps[1::2], self.steps[2::2], strict=False):
            if first[2] == second[2]:
                seconds = {first[1]: second[0] - first[0], second[1]: after[0] - second[0]}
                found.append((seconds[True], seconds[False]))
        return found


def model_pairs(num_requests: int, flags: Sequence[str]) -> list[tuple[float, float]]:
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
    return runner.pairs()


def loop_report(pairs: Sequence[tuple[Cost, Cost]]) -> str:
    per_step = sorted(1e6 * (on.loop_seconds / on.steps - off.loop_seconds / off.steps) for on, off in pairs)
    low, middle, high = statistics.quantiles(per_step, n=4)
    return f"loop: {middle:.1f} us of a step (quarters {low:.1f} to {high:.1f}), {len(pairs)} pairs of {pairs[0][0].steps} steps of {BATCH} rows"


def model_report(pairs: Sequence[tuple[float, float]], seed: int = 0) -> str:
    """The median ratio of throughputs (without accounting: 1), and where it lies in 95 of 100 samples of the pairs."""
    rng = random.Random(seed)
    ratios = [off / on for on, off in pairs]
    samples = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    step = statistics.median(off for _, off in pairs)
    return (
        f"model: throughput with accounting {statistics.median(ratios):.4f} of that without (95 %: {samples[25]:.4f} to {samples[974]:.4f}), "
        f"{len(pairs)} pairs of steps of {1e3 * step:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="of the run with a model; 0: none")
    parser.add_argument("--loop-pairs", type=int, default=31)
    parser.add_argument("--loop-steps", type=int, default=400)
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    options = parser.parse_args()
    flags = options.flags or ["--quantization", "gguf", "--max-model-len", "2048"]
    print(loop_report(loop_pairs(options.loop_pairs, options.loop_steps)), flush=True)
    if options.requests:
        print(model_report(model_pairs(options.requests, flags)))


if __name__ == "__main__":
    main()
