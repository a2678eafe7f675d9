"""What one step takes, part by part, for a grid of shapes.

A shape is `rows` decoding requests with `context` tokens each behind them, and beside them one chunk of `prompt_tokens` tokens of a prompt, of which
`context` tokens are there already. The runner executes plans made for exactly that shape; a scheduler of its own, in front of no runner, is
brought to the same shape for the time of planning, of taking results in, and of the messages to the HTTP process (encoded and decoded). What the
KV storage holds doesn't matter to the time, so contexts are not computed first: they are zeros (`blank`). Rounds go over the whole grid in an order
of their own each, so that a machine whose speed drifts favours no shape.

The result is one JSON object:

    format            "headrace-step-1"
    date, command, headrace_version, torch_version
    machine           in words
    model             path or name
    engine            dtype, kv_cache_dtype, device, threads, path, block_size, num_blocks, max_model_len, weight_bytes
    points            a list of objects:
      rows, context, prompt_tokens     the shape; all >= 0
      tokens                           rows + prompt_tokens
      attended                         rows * (context + 1) + prompt_tokens * (context + prompt_tokens)
      sampled                          rows that a token is drawn for: `rows`, the chunk is never a prompt's last
      runner_ms                        one number a measured step: the wall time of `execute`, which is what one step adds to the wheel while
                                       plans are made ahead
      ms                               the median of each part, in milliseconds: plan, inputs, model, sample, other (of the runner: slots, copies,
                                       bookkeeping), update, messages; inputs + model + sample + other make `execute`
    skipped           shapes that did not fit, each with rows, context, prompt_tokens and reason
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import EngineConfig, EngineInfo, SchedulerConfig
from headrace.core.messages import AddRequest, Row, SampledRow, SlotStart, StepPlan, StepResult
from headrace.core.scheduler import Scheduler
from headrace.core.step_time import MIN_STEPS
from headrace.engine.wire import HEADER_BYTES, Outputs, decode_from_engine, encode_frame
from headrace.runner.interface import Runner
from headrace.runner.kv_storage import KVCaches
from headrace.sampling_params import SamplingParams

FORMAT = "headrace-step-1"
PARTS = ("plan", "inputs", "model", "sample", "other", "update", "messages")
STEPS = 2  # measured ones of a shape in a round, behind one that is not
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
_TOKEN = 1  # any id: what a token is does not change what it costs
_DESK_STEP_S = 1e-3  # what the scheduler in front of no runner believes of every step


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    rows: int
    context: int
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        return self.rows + self.prompt_tokens

    @property
    def attended(self) -> int:
        return self.rows * (self.context + 1) + self.prompt_tokens * (self.context + self.prompt_tokens)


def grid(rows: Iterable[int], contexts: Iterable[int], prompt_tokens: Iterable[int]) -> list[Shape]:
    """Every combination that is a step: something to compute, and no row that decodes behind nothing."""
    shapes = (Shape(rows=r, context=c, prompt_tokens=p) for r, c, p in itertools.product(rows, contexts, prompt_tokens))
    return [shape for shape in shapes if shape.tokens and not (shape.rows and not shape.context)]


def misfit(shape: Shape, config: EngineConfig, info: EngineInfo) -> str | None:
    """Why a shape can't be run with these settings; None where it can."""
    if shape.rows + 1 > config.max_num_seqs:
        return f"{shape.rows} rows and a prompt need --max-num-seqs {shape.rows + 1}"
    if shape.tokens > config.max_num_batched_tokens:
        return f"{shape.tokens} tokens need --max-num-batched-tokens {shape.tokens}"
    longest = shape.context + max(STEPS if shape.rows else 0, shape.prompt_tokens)
    if longest > info.max_model_len:
        return f"{longest} tokens are more than --max-model-len {info.max_model_len}"
    if _blocks(shape, info.block_size) > info.num_blocks:
        return f"{_blocks(shape, info.block_size)} blocks are more than the KV storage's {info.num_blocks}; give more with --kv-memory"
    return None


def _blocks(shape: Shape, block_size: int) -> int:
    of_prompt = -(-(shape.context + shape.prompt_tokens) // block_size) if shape.prompt_tokens else 0
    return shape.rows * -(-(shape.context + STEPS) // block_size) + of_prompt


def blank(caches: KVCaches, shapes: Sequence[Shape], block_size: int) -> None:
    """Zeros in the blocks that the shapes use: what memory holds by chance need not be numbers."""
    most = max((_blocks(shape, block_size) for shape in shapes), default=0)
    for pair in caches:
        for cache in pair:
            cache[:most] = 0


def measure(
    runner: Runner, shapes: Sequence[Shape], *, rounds: int, seed: int = 0, on_visit: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """The points of the result, in the order of `shapes`, all of which must fit, on `blank` blocks. `on_visit` is told rounds * len(shapes) times."""
    found: dict[Shape, list[dict[str, float]]] = {shape: [] for shape in shapes}
    draw = random.Random(seed)
    for _ in range(rounds):
        for shape in draw.sample(shapes, len(shapes)):
            for ran, planned in zip(_execute(runner, shape), _plan(shape, runner.block_size), strict=True):
                found[shape].append(ran | planned)
            on_visit()
    return [_point(shape, samples) for shape, samples in found.items()]


def coordinates(shape: Shape) -> dict[str, int]:
    return {"rows": shape.rows, "context": shape.context, "prompt_tokens": shape.prompt_tokens}


def engine_facts(info: EngineInfo) -> dict[str, Any]:
    names = ("dtype", "kv_cache_dtype", "device", "threads", "path", "block_size", "num_blocks", "max_model_len", "weight_bytes")
    return {name: getattr(info, name) for name in names}


def _point(shape: Shape, samples: list[dict[str, float]]) -> dict[str, Any]:
    return {
        **coordinates(shape),
        "tokens": shape.tokens,
        "attended": shape.attended,
        "sampled": shape.rows,
        "runner_ms": [1e3 * sum(sample[part] for part in ("inputs", "model", "sample", "other")) for sample in samples],
        "ms": {part: 1e3 * statistics.median(sample[part] for sample in samples) for part in PARTS},
    }


def _execute(runner: Runner, shape: Shape) -> list[dict[str, float]]:
    """Seconds of the runner's parts in each measured step."""
    free = itertools.count()
    starts, tables = [], []
    longest = shape.context + shape.prompt_tokens
    for slot in range(shape.rows + bool(shape.prompt_tokens)):
        length = shape.context if slot < shape.rows else longest
        room = shape.context + STEPS if slot < shape.rows else longest
        tables.append(tuple(itertools.islice(free, -(-room // runner.block_size))))
        starts.append(
            SlotStart(request_id=f"r{slot}", slot=slot, token_ids=(_TOKEN,) * length, num_prompt_tokens=length, params=GREEDY, eos_token_ids=())
        )
    runner.execute(StepPlan(step_id=1, rows=(), starts=tuple(starts)))
    seconds = []
    for step in range(1 + STEPS):  # the first one enters the blocks, and is not measured
        new = tables if step == 0 else [()] * len(tables)
        rows = [_decode_row(slot, shape.context - 1 + step, new[slot]) for slot in range(shape.rows)]
        if shape.prompt_tokens:
            rows.append(_chunk_row(shape, new[-1]))
        begin = time.perf_counter()
        result = runner.execute(StepPlan(step_id=2 + step, rows=tuple(rows)))
        wall = time.perf_counter() - begin
        assert not any(row.error for row in result.rows), next(row.error for row in result.rows if row.error)
        known = {"inputs": result.input_seconds, "model": result.model_seconds, "sample": result.sample_seconds}
        seconds.append(known | {"other": wall - sum(known.values())})
    return seconds[1:]


def _decode_row(slot: int, start: int, blocks: tuple[int, ...]) -> Row:
    return Row(request_id=f"r{slot}", slot=slot, start=start, num_tokens=1, token_ids=(), block_offset=0, new_block_ids=blocks, sample=True)


def _chunk_row(shape: Shape, blocks: tuple[int, ...]) -> Row:
    count = shape.prompt_tokens
    tokens = (_TOKEN,) * count
    name, slot = f"r{shape.rows}", shape.rows
    return Row(
        request_id=name, slot=slot, start=shape.context, num_tokens=count, token_ids=tokens, block_offset=0, new_block_ids=blocks, sample=False
    )


def _plan(shape: Shape, block_size: int) -> list[dict[str, float]]:
    """Seconds of planning, taking in and messages in each measured step, by a scheduler whose runner answers at once."""
    num_decodes = MIN_STEPS + 1 + STEPS
    longest = max(shape.context + num_decodes + 2, shape.prompt_tokens + 1)
    config = SchedulerConfig(
        max_model_len=longest,
        max_num_seqs=shape.rows + 1,
        max_num_batched_tokens=max(shape.tokens, shape.rows * shape.context),  # all contexts in one step
        block_size=block_size,
        num_blocks=(shape.rows + 1) * -(-longest // block_size) + 1,
        target_itl_ms=1e9,  # chunks are as long as the shape says
    )
    scheduler = Scheduler(config)
    if shape.prompt_tokens:
        _add(scheduler, "warm", shape.prompt_tokens, 1)  # a scheduler lets chunks grow no faster than twofold
        _turn_until(scheduler, lambda plan: False)
    for slot in range(shape.rows):
        _add(scheduler, f"r{slot}", shape.context, num_decodes + 2)
    ready = {f"r{slot}" for slot in range(shape.rows)}
    if ready:
        _turn_until(scheduler, lambda plan: {row.request_id for row in plan.rows if row.sample} >= ready)
        for _ in range(MIN_STEPS):  # before so many it lets only short chunks in beside decodes
            _turn(scheduler)
    seconds = []
    for step in range(1 + STEPS):
        if shape.prompt_tokens:
            _add(scheduler, f"p{step}", shape.prompt_tokens, 1)
        plan, parts = _turn(scheduler)
        assert plan.num_tokens == shape.tokens, f"{plan.num_tokens} tokens instead of {shape}"
        seconds.append(parts)
    return seconds[1:]


def _add(scheduler: Scheduler, name: str, length: int, max_tokens: int) -> None:
    ids = (int.from_bytes(name.encode()) % 50_000, *((_TOKEN,) * (length - 1)))  # no two prompts begin alike, as in a busy service
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    refused = scheduler.add(AddRequest(request_id=name, prompt_token_ids=ids, params=params, arrival=0.0), 0.0)
    assert refused is None, refused.error_message


def _turn_until(scheduler: Scheduler, arrived: Callable[[StepPlan], bool]) -> None:
    """Turns until a plan is what was waited for, or there is nothing to do."""
    while scheduler.has_work():
        plan, _ = _turn(scheduler)
        if arrived(plan):
            return


def _turn(scheduler: Scheduler) -> tuple[StepPlan, dict[str, float]]:
    begin = time.perf_counter()
    plan = scheduler.plan(0.0)
    planned = time.perf_counter()
    assert plan is not None
    rows = tuple(SampledRow(request_id=row.request_id, token_ids=(_TOKEN,) if row.sample else ()) for row in plan.rows)
    result = StepResult(step_id=plan.step_id, rows=rows, seconds=_DESK_STEP_S)
    start = time.perf_counter()
    outputs = scheduler.update(result, 0.0)
    updated = time.perf_counter()
    decode_from_engine(encode_frame(Outputs(tuple(outputs)))[HEADER_BYTES:])
    return plan, {"plan": planned - begin, "update": updated - start, "messages": time.perf_counter() - updated}


def table(points: Iterable[dict[str, Any]]) -> str:
    """One line a shape: milliseconds of the parts, of the runner, and of all."""
    lines = [f"{'rows':>5}{'context':>9}{'prompt':>8} " + "".join(f"{part:>10}" for part in PARTS) + f"{'runner':>10}{'tokens/s':>10}"]
    for point in points:
        runner = statistics.median(point["runner_ms"])
        parts = "".join(f"{point['ms'][part]:>10.2f}" for part in PARTS)
        lines.append(
            f"{point['rows']:>5}{point['context']:>9}{point['prompt_tokens']:>8} {parts}{runner:>10.2f}{1e3 * point['tokens'] / runner:>10.0f}"
        )
    return "\n".join(lines)
