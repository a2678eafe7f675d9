#!/usr/bin/env python3
"""What it costs that the engine divides its time into kinds: pairs of runs with the accounting and without it.

    python scripts/accounting_cost.py
    python scripts/accounting_cost.py --pairs 3 --requests 16 --loop-pairs 31

First the engine's loop alone, with a runner that computes nothing: what a step's bookkeeping takes in processor time, with and without. Then
a model under the load of a busy service (prompts lognormal 32-512 around 128, answers 16-256 around 64, 16 at a time): throughput with
and without, in turn. The cost of the first in a step of the second is the figure that other work on the machine hardly changes. Without: the
ledger, the sorting of a step's tokens and the causes of prefix misses are replaced by nothing, in this process alone. What stands after `--`
are flags of `headrace serve`; the default is `--quantization gguf --max-model-len 2048`.
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
from headrace.core import admission, scheduler
from headrace.core.messages import AddRequest
from headrace.core.prefix_misses import PrefixMisses
from headrace.core.scheduler import Scheduler
from headrace.core.step_tokens import StepTokens
from headrace.engine import engine_core
from headrace.engine.async_llm import make_engine_config
from headrace.engine.engine_core import EngineCore
from headrace.engine.engine_host import scheduler_config
from headrace.engine.wire import Add, FromEngine, Outputs, Shutdown, encode_frame
from headrace.observe.work import Work
from headrace.runner.fake import FakeRunner, FakeScript
from headrace.sampling_params import SamplingParams

BATCH = 16


class NoLedger:
    """A `WorkLedger` that keeps nothing."""

    def __init__(self, now: float) -> None:
        self._work = Work()

    def snapshot(self) -> Work:
        return self._work

    def lap(self, now: float) -> float:
        return 0.0

    def pass_between(self, kind: str, now: float) -> None:
        pass

    def add_step(self, seconds: float, **what: Any) -> None:
        pass


class NoMisses(PrefixMisses):
    def note(self, *args: Any, **what: Any) -> None:
        pass


NO_TOKENS = StepTokens()


def nothing(step: Any, result: Any) -> StepTokens:
    """In place of `core.step_tokens.tokens_of`; a mock would take longer than what it stands for."""
    return NO_TOKENS


@contextlib.contextmanager
def accounting(on: bool) -> Iterator[None]:
    """Of cores and schedulers that are made within."""
    with contextlib.ExitStack() as stack:
        if not on:
            stack.enter_context(mock.patch.object(engine_core, "WorkLedger", NoLedger))
            stack.enter_context(mock.patch.object(scheduler, "tokens_of", nothing))
            stack.enter_context(mock.patch.object(admission, "PrefixMisses", NoMisses))
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    tokens: int
    steps: int
    seconds: float
    loop_seconds: float  # processor time of the loop's thread


def run(runner: Any, config: EngineConfig, requests: Sequence[AddRequest], *, on: bool) -> Cost:
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

    with accounting(on):
        core = EngineCore(runner, Scheduler(scheduler_config(config, runner.info(0.0), num_host_blocks=0)), emit)
        for request in requests:
            core.post(Add(request))
        begin, cpu = time.perf_counter(), time.thread_time()
        core.run()
        return Cost(tokens=tokens, steps=steps, seconds=time.perf_counter() - begin, loop_seconds=time.thread_time() - cpu)


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


def in_pairs(count: int, measure: Any) -> list[tuple[Cost, Cost]]:
    """(with, without), in turn and each time in the other order, after one pair to warm up; `measure(on, number)`."""
    pairs = []
    for number in range(count + 1):
        order = (True, False) if number % 2 else (False, True)
        costs = {on: measure(on, number) for on in order}
        pairs.append((costs[True], costs[False]))
    return pairs[1:]


def loop_pairs(count: int, num_steps: int) -> list[tuple[Cost, Cost]]:
    config = EngineConfig(model="", max_num_seqs=BATCH, max_model_len=1024, num_gpu_blocks_override=2048)

    def measure(on: bool, number: int) -> Cost:
        runner = FakeRunner(config, FakeScript(vocab_size=1000))
        return run(runner, config, [request(f"r{i}", [i + 2, 3, 4], num_steps) for i in range(BATCH)], on=on)

    return in_pairs(count, measure)


def model_pairs(count: int, num_requests: int, flags: Sequence[str]) -> list[tuple[Cost, Cost]]:
    from headrace.runner.model_runner import ModelRunner

    parser = argparse.ArgumentParser(prog="accounting_cost.py -- ...")
    add_options(parser, ENGINE_GROUPS)
    parser.add_argument("--model")
    settings = {name.replace("_", "-"): value for name, value in vars(parser.parse_args(flags)).items()}
    settings["max-num-seqs"] = BATCH
    config = make_engine_config(settings.pop("model", None), engine_options(settings))
    runner = ModelRunner(config)
    try:
        return in_pairs(count, lambda on, number: run(runner, config, busy_service(num_requests, number), on=on))
    finally:
        runner.close()


def report(loop: Sequence[tuple[Cost, Cost]], model: Sequence[tuple[Cost, Cost]]) -> str:
    """Medians, and between which of the pairs they lie."""
    per_step = sorted(1e6 * (on.loop_seconds / on.steps - off.loop_seconds / off.steps) for on, off in loop)
    size = f"{len(loop)} pairs of {loop[0][0].steps} steps of {BATCH} rows"
    lines = [f"loop: {statistics.median(per_step):.1f} us a step (quarters {_quarters(per_step)}), {size}"]
    if model:
        ratios = sorted((on.tokens / on.seconds) / (off.tokens / off.seconds) for on, off in model)
        step = statistics.median(off.seconds / off.steps for _, off in model)
        lines += [
            f"model: {statistics.median(on.tokens / on.seconds for on, _ in model):.0f} tokens/s with, "
            f"{statistics.median(off.tokens / off.seconds for _, off in model):.0f} without: ratio {statistics.median(ratios):.4f} "
            f"({ratios[0]:.4f} to {ratios[-1]:.4f}, {len(model)} pairs)",
            f"cost: {statistics.median(per_step) / 1e6 / step:.4%} of a step of {1e3 * step:.1f} ms",
        ]
    return "\n".join(lines)


def _quarters(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0], 0.0, values[0])
    return f"{low:.1f} to {high:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="of runs with a model; 0: none")
    parser.add_argument("--requests", type=int, default=16, help="in each of them")
    parser.add_argument("--loop-pairs", type=int, default=31)
    parser.add_argument("--loop-steps", type=int, default=400)
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    options = parser.parse_args()
    flags = options.flags or ["--quantization", "gguf", "--max-model-len", "2048"]
    loop = loop_pairs(options.loop_pairs, options.loop_steps)
    print(report(loop, []), flush=True)
    print(report(loop, model_pairs(options.pairs, options.requests, flags)) if options.pairs else "")


if __name__ == "__main__":
    main()
