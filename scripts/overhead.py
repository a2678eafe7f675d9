#!/usr/bin/env python3
"""What a decode step costs beside the model: every part from wake-up to wake-up, at a given batch.

    python scripts/overhead.py --batch 16 --steps 100
    python scripts/overhead.py --batch 16 --steps 100 -- --quantization none

First the engine's loop in this process, one part after the other, so that their times add up to a step; then the same load over HTTP against a
server of its own, for the processor time of the process that speaks HTTP. What stands after `--` goes to `headrace serve` and the engine
alike; the default is `--quantization gguf`. Of all steps the quarter with the least wall time counts: other work on the machine makes the
rest. The parts without threads of their own are given in processor time too, which other work hardly changes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import psutil

from headrace.cli.options import ENGINE_GROUPS, add_options
from headrace.cli.settings import engine_options
from headrace.core.messages import AddRequest
from headrace.core.scheduler import Scheduler
from headrace.engine.async_llm import make_engine_config
from headrace.engine.choice import Choice
from headrace.engine.engine_host import scheduler_config
from headrace.engine.engine_process import child_environment
from headrace.engine.wire import HEADER_BYTES, Outputs, decode_from_engine, encode_frame
from headrace.sampling_params import SamplingParams
from headrace.server.answer import Header, Piece, Usage
from headrace.server.choices import ChoicesWire
from headrace.server.routes_completions import CompletionForm
from headrace.text.tokenizer import Tokenizer

PROMPT_TOKENS = 128
WARM_UP_STEPS = 10
MODEL_PARTS = ("model: layers", "model: logits")


class Clock:
    """Wall and processor seconds of named parts, step by step. A part within another is taken out of it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[float]]] = []
        self._open: list[list[float]] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inner = [0.0, 0.0]
            self._open.append(inner)
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = [time.perf_counter() - wall, time.thread_time() - cpu]
                self._open.pop()
                totals = self.steps[-1].setdefault(name, [0.0, 0.0])
                for i in range(2):
                    totals[i] += spent[i] - inner[i]
                    if self._open:
                        self._open[-1][i] += spent[i]

        return call

    def best(self) -> dict[str, tuple[float, float]]:
        """Mean milliseconds (wall, processor) of each part over the quarter of the steps with the least wall time."""
        ordered = sorted(self.steps, key=lambda step: sum(wall for wall, _ in step.values()))
        chosen = ordered[: max(1, len(ordered) // 4)]
        return {
            name: tuple(1000 * sum(step[name][i] for step in chosen) / len(chosen) for i in range(2))  # type: ignore[misc]
            for name in chosen[0]
        }


def engine_parts(flags: Sequence[str], batch: int, num_steps: int) -> dict[str, tuple[float, float]]:
    from headrace.runner.model_runner import ModelRunner

    parser = argparse.ArgumentParser(prog="overhead.py -- ...")
    add_options(parser, ENGINE_GROUPS)
    parser.add_argument("--model")
    settings = {name.replace("_", "-"): value for name, value in vars(parser.parse_args(flags)).items()}
    config = make_engine_config(settings.pop("model", None), engine_options(settings))
    tokenizer = Tokenizer.load(config.model)
    runner = ModelRunner(config)
    scheduler = Scheduler(scheduler_config(config, runner.info(0.0), num_host_blocks=runner.num_host_blocks))
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2 * WARM_UP_STEPS, ignore_eos=True)
    names = [f"r{i}" for i in range(batch)]
    for i, name in enumerate(names):
        prompt = tuple((7 * j + 131 * i) % 10_000 + 100 for j in range(PROMPT_TOKENS))
        scheduler.add(AddRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival=0.0), 0.0)
    choices = {name: Choice(0, params, tokenizer, limit=1) for name in names}
    wire = ChoicesWire(CompletionForm(_PlainRequest()), Header(answer_id="cmpl-0", created=0, model="model"), Usage(), _PlainRequest())  # type: ignore[arg-type]

    clock = Clock()
    plan, update = clock.timed("scheduling: plan", scheduler.plan), clock.timed("scheduling: update", scheduler.update)
    execute = clock.timed("runner: the rest", runner.execute)
    encode = clock.timed("messages: encode", encode_frame)
    decode = clock.timed("messages: decode", decode_from_engine)
    runner._inputs.build = clock.timed("inputs", runner._inputs.build)  # type: ignore[method-assign]
    runner._forward = clock.timed("model: layers", runner._forward)  # type: ignore[method-assign]
    runner._model.compute_logits = clock.timed("model: logits", runner._model.compute_logits)  # type: ignore[method-assign]
    runner._sampler.sample = clock.timed("sampling", runner._sampler.sample)  # type: ignore[method-assign]

    def detokenise(outputs: Outputs) -> list[Any]:
        deltas = []
        for output in outputs.outputs:
            choices[output.request_id].push(output)
            deltas.append(choices[output.request_id].take())
        return deltas

    def events(deltas: list[Any]) -> list[bytes]:
        return [wire.events([Piece(index=0, opens=False, text=delta.text, finish_reason=delta.finish_reason)]) for delta in deltas]

    to_text, to_events = clock.timed("detokenising", detokenise), clock.timed("events", events)
    while scheduler.has_work():
        clock.steps.append({})
        step = plan(time.monotonic())
        outputs = update(execute(step), time.monotonic())
        frame = encode(Outputs(tuple(outputs), None))
        to_events(to_text(decode(frame[HEADER_BYTES:])))
        decodes_alone = step.num_tokens == len(step.rows) == batch
        if not decodes_alone:
            clock.steps.pop()
    runner.close()
    clock.steps = clock.steps[WARM_UP_STEPS:]
    return clock.best()


class _PlainRequest:
    """A request for a stream without extras, as the writer of choices asks for it."""

    include_usage = continuous_usage = return_token_ids = False
    logprobs = prompt_logprobs = None


def http_milliseconds_per_step(flags: Sequence[str], batch: int, num_steps: int) -> float:
    """Processor milliseconds of the HTTP process for one step of `batch` streams."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *flags]
    with ExitStack() as stack:
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()))
        stack.callback(server.terminate)
        assert server.stdout is not None
        url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        threading.Thread(target=server.stdout.read, daemon=True).start()
        process = psutil.Process(server.pid)
        running = threading.Barrier(batch + 1, timeout=600)
        threads = [threading.Thread(target=_stream, args=(url, i, num_steps, running)) for i in range(batch)]
        for thread in threads:
            thread.start()
        running.wait()  # every stream has its first token
        before = process.cpu_times()
        for thread in threads:
            thread.join()
        after = process.cpu_times()
        return 1000 * (after.user + after.system - before.user - before.system) / num_steps


def _stream(url: str, index: int, num_tokens: int, running: threading.Barrier) -> None:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=600)
    prompt = [(7 * j + 131 * index) % 10_000 + 100 for j in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the server answered {response.status}: {response.read(500)!r}")
    response.readline()
    running.wait()
    while response.read1(65536):
        pass
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    options = parser.parse_args()
    flags = options.flags or ["--quantization", "gguf", "--max-model-len", "2048"]
    parts = engine_parts(flags, options.batch, options.steps)
    http = http_milliseconds_per_step(flags, options.batch, options.steps)
    known = sum(parts[name][1] for name in ("messages: decode", "detokenising", "events"))
    parts["HTTP process: event loop and sockets"] = (max(0.0, http - known), max(0.0, http - known))
    print(table(parts, options.batch))


def table(parts: dict[str, tuple[float, float]], batch: int) -> str:
    """Parts from the largest on, and what all beside the model take together: in wall time, and in processor time of the thread that runs them.

    The second is the stricter one where the machine is shared: it counts only what the model's calling thread computes, not what it waits.
    """
    totals = [sum(part[i] for part in parts.values()) for i in range(2)]
    besides = [totals[i] - sum(parts[name][i] for name in MODEL_PARTS) for i in range(2)]
    lines = ["| part | wall ms | share | processor ms | share |", "|---|---|---|---|---|"]
    for name, (wall, cpu) in sorted(parts.items(), key=lambda item: -item[1][1]):
        lines.append(f"| {name} | {wall:.2f} | {wall / totals[0]:.1%} | {cpu:.2f} | {cpu / totals[1]:.1%} |")
    lines.append(f"| a step of {batch} rows | {totals[0]:.2f} | | {totals[1]:.2f} | |")
    lines.append(f"| beside the model | {besides[0]:.2f} | {besides[0] / totals[0]:.1%} | {besides[1]:.2f} | {besides[1] / totals[1]:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
