#!/usr/bin/env python3
"""How fast `headrace plan` replays: seconds of a core for a made-up trace on one engine whose steps take 2 ms and 0.05 ms a token.

python scripts/plan_speed.py
python scripts/plan_speed.py poisson:rate=40,prompt=256,output=32,requests=100000,sigma=0.6
"""

from __future__ import annotations

import sys
import time

from headrace.bench.traces import load_trace
from headrace.cli.plan_engine import scheduler_config
from headrace.core.step_work import StepWork
from headrace.plan.fleet import Engine, replay
from headrace.plan.simulator import Delays

TRACE = "poisson:rate=85,prompt=128,output=32,requests=100000,sigma=0.6"
MAX_MODEL_LEN, NUM_BLOCKS = 8192, 8000


class Costs:
    def seconds(self, work: StepWork) -> float:
        return 2e-3 + 5e-5 * work.tokens


def main(words: list[str]) -> int:
    for text in words or [TRACE]:
        trace = load_trace(text)
        config = scheduler_config(trace, {"max-num-queued-reqs": len(trace.requests)}, max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS)
        begin = time.process_time()
        fleet = replay(trace, Engine(config=config, costs=lambda number: Costs(), delays=Delays()), 1)
        seconds = time.process_time() - begin
        assert fleet is not None
        rows = fleet.num_output_tokens / fleet.steps
        each = 1e6 * seconds / fleet.num_output_tokens
        print(f"{text}: {seconds:.1f} s of a core, {each:.1f} us for each of {fleet.num_output_tokens} output tokens, {rows:.1f} a step")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
