#!/usr/bin/env python3
"""How far the engine is from what the machine can do: decode steps of 1, 4 and 16 rows and a prompt of 2,048 tokens, as a table.

    python scripts/roofline.py
    python scripts/roofline.py -- --quantization none --dtype float32

The limit of a step is the larger of two times: the bytes it must read over what all threads read a second, and its multiply-adds over what
they can make a second, those of weights in blocks, those in float32 and those of bfloat16 tiles (AMX: the tokens of prompts) one after the
other. The ceilings are measured first, on the same threads with the instructions of the kernels (`roofline_peaks.cpp`). Our time is that of a
whole step in the engine (inputs, model, sampling), the fastest of many: others on the machine make the rest. What stands after `--` are flags
of `headrace serve`; the default is `--quantization gguf`.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.cli.options import ENGINE_GROUPS, add_options
from headrace.cli.settings import engine_options
from headrace.config import EngineConfig
from headrace.core.messages import AddRequest
from headrace.core.scheduler import Scheduler
from headrace.engine.async_llm import make_engine_config
from headrace.engine.engine_host import scheduler_config
from headrace.kernels import cpu
from headrace.kernels.cpu.build import INSTRUCTION_SETS, SOURCES, find_compiler
from headrace.models.decoder import Decoder
from headrace.models.loader import weight_bytes
from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams

PEAKS = Path(__file__).with_name("roofline_peaks.cpp")
ROUNDS = 12
DECODE_BATCHES = (1, 4, 16)
DECODE_CONTEXT, DECODE_STEPS = 128, 48  # tokens before the first measured step, and steps
PREFILL_TOKENS, PREFILLS = 2048, 3
FIXED_FLAGS = ("--max-model-len", "4096", "--no-enable-prefix-caching")
FLOAT32 = 0
FLOAT_FORMATS = {number for number, name in cpu.FORMATS.items() if name in ("F32", "F16", "BF16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Of all threads together."""

    read: float  # bytes a second
    packed: float  # multiply-adds of weights in blocks a second
    floats: float  # float32 multiply-adds a second
    tiles: float = 0.0  # multiply-adds of bfloat16 tiles a second; 0: there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Of one step. Operations are multiply-adds."""

    num_bytes: int
    packed: int
    floats: int
    tiles: int = 0

    def limit(self, ceilings: Ceilings) -> float:
        """Seconds."""
        by_tiles = self.tiles / ceilings.tiles if self.tiles else 0.0
        return max(self.num_bytes / ceilings.read, self.packed / ceilings.packed + self.floats / ceilings.floats + by_tiles)


def need(model: Decoder, contexts: Sequence[tuple[int, int]], *, kv_bytes: int, by_tiles: bool = False) -> Need:
    """`contexts`: for each row its tokens in the step, and the positions before them; each row samples once.

    `kv_bytes`: of a token's keys and values. `by_tiles`: the tokens are those of prompts, on a machine with bfloat16 tiles.
    """
    config = model.config
    tokens, rows = sum(n for n, _ in contexts), len(contexts)
    seen = sum(n * before + n * (n + 1) // 2 for n, before in contexts)  # positions that tokens attend to
    packed, floats, tiles, attention = 0, 0, 0, seen * 2 * config.num_heads * config.head_dim * config.num_layers
    matrices = [(module, tokens) for layer in model.layers for module in layer.modules()]
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    matrices.append((head, rows))
    for module, times in matrices:
        if isinstance(module, cpu.PackedLinear | cpu.PackedEmbedding):
            products = module.rows * module.columns * times * (1 if module.format == module.type_number else 2)  # 16-bit activations go twice
            if by_tiles and module is not head and module.format == module.type_number and module.type_number != FLOAT32:
                tiles += products
            elif module.type_number in FLOAT_FORMATS:
                floats += products
            else:
                packed += products
        elif isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.dim() == 2:
            floats += weight.numel() * times
    if tiles:
        tiles += attention
    else:
        floats += attention
    num_bytes = weight_bytes(model) + kv_bytes * sum(n + before for n, before in contexts)
    return Need(num_bytes=num_bytes, packed=packed, floats=floats, tiles=tiles)


def measure_ceilings(isa: str, threads: int, rounds: int = ROUNDS) -> Ceilings:
    """Raises KernelBuildError without a compiler, CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peaks"
        flags = ["-std=c++17", "-O3", "-pthread", "-Wno-psabi", f"-I{SOURCES}", *INSTRUCTION_SETS[isa].compiler_flags]
        subprocess.run([find_compiler(), *flags, str(PEAKS), "-o", str(program)], check=True, timeout=120)
        output = subprocess.run([program, str(threads), str(rounds)], check=True, capture_output=True, text=True, timeout=300).stdout
    read, packed, floats, tiles = (float(word) * 1e9 for word in output.split())
    return Ceilings(read=read, packed=packed, floats=floats, tiles=tiles)


def run_steps(
    runner: ModelRunner, config: EngineConfig, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[list[tuple[int, int]], float]]:
    """For each step its rows (tokens, positions before them) and seconds."""
    scheduler = Scheduler(scheduler_config(config, runner.info(0.0), num_host_blocks=0))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        scheduler.add(AddRequest(request_id=f"r{i}", prompt_token_ids=tuple(prompt), params=params, arrival=0.0), 0.0)
    steps = []
    while scheduler.has_work():
        plan = scheduler.plan(time.monotonic())
        assert plan is not None, "there is work, and room for it"
        begin = time.perf_counter()
        result = runner.execute(plan)
        seconds = time.perf_counter() - begin
        steps.append(([(row.num_tokens, row.start) for row in plan.rows], seconds))
        scheduler.update(result, time.monotonic())
    return steps


def prompt_of(tokens: int, seed: int) -> list[int]:
    return [(7 * i + 131 * seed) % 10_000 + 100 for i in range(tokens)]


def config_of(flags: Sequence[str]) -> EngineConfig:
    parser = argparse.ArgumentParser(prog="roofline.py -- ...")
    add_options(parser, ENGINE_GROUPS)
    parser.add_argument("--model")
    settings = {name.replace("_", "-"): value for name, value in vars(parser.parse_args(flags)).items()}
    return make_engine_config(settings.pop("model", None), engine_options(settings))


def measure(config: EngineConfig) -> tuple[Ceilings, list[tuple[str, Need, float]], str]:
    """Ceilings, the name, need and seconds of each kind of step, and the instruction set."""
    runner = ModelRunner(config)
    kernels = cpu.load()
    if kernels is None:
        raise SystemExit(f"There are no CPU kernels to measure: {cpu.reason()}.")
    kv_bytes = sum(cache[0].element_size() * cache[0][0, 0].numel() * 2 for cache in runner.caches)
    ceilings = measure_ceilings(kernels.isa, torch.get_num_threads())
    rows: list[tuple[str, Need, float]] = []
    for batch in DECODE_BATCHES:
        steps = run_steps(runner, config, [prompt_of(DECODE_CONTEXT, seed) for seed in range(batch)], DECODE_STEPS)
        decodes = [(contexts, seconds) for contexts, seconds in steps if [n for n, _ in contexts] == [1] * batch]
        contexts, seconds = min(decodes, key=lambda step: step[1])
        rows.append((f"decode, {batch} row{'s' * (batch > 1)}", need(runner.model, contexts, kv_bytes=kv_bytes), seconds))
    takes = [run_steps(runner, config, [prompt_of(PREFILL_TOKENS, 100 + seed)], 1) for seed in range(PREFILLS)]
    seconds = min(sum(seconds for _, seconds in steps) for steps in takes)
    rows.append(
        (f"prefill, {PREFILL_TOKENS:,} tokens", need(runner.model, [(PREFILL_TOKENS, 0)], kv_bytes=kv_bytes, by_tiles=kernels.isa == "amx"), seconds)
    )
    runner.close()
    return ceilings, rows, kernels.isa


def table(ceilings: Ceilings, rows: Sequence[tuple[str, Need, float]]) -> str:
    lines = [
        "| step | MB to read | G products in blocks | in float32 | by tiles | limit, ms | our time, ms | share of the limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each, seconds in rows:
        limit = each.limit(ceilings)
        sizes = f"{each.num_bytes / 1e6:.0f} | {each.packed / 1e9:.2f} | {each.floats / 1e9:.2f} | {each.tiles / 1e9:.2f}"
        lines.append(f"| {name} | {sizes} | {1000 * limit:.2f} | {1000 * seconds:.2f} | {limit / seconds:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flags", nargs="*", help="after --: flags of headrace serve")
    flags = parser.parse_args().flags or ["--quantization", "gguf"]
    ceilings, rows, isa = measure(config_of([*flags, *FIXED_FLAGS]))
    print(f"{isa}, {torch.get_num_threads()} threads; they read {ceilings.read / 1e9:.1f} GB/s and make, in billions a second,")
    print(f"{ceilings.packed / 1e9:.0f} multiply-adds with weights in blocks, {ceilings.floats / 1e9:.0f} in float32", end=" or ")
    print(f"{ceilings.tiles / 1e9:.0f} by tiles.\n")
    print(table(ceilings, rows))


if __name__ == "__main__":
    main()
