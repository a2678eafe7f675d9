"""In deterministic mode a token's logits are the same to the last bit, whatever shares its step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.messages import TokenLogprobs
from headrace.runner.deterministic import TILE, tiled
from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from tests.runner.tiny_model import Hand, save_tiny_llama

PARAMS = SamplingParams(temperature=0.0, max_tokens=None, logprobs=8, prompt_logprobs=2)
NEW = 4


@pytest.fixture(scope="module", params=[{"head_dim": 16}, {"head_dim": 20, "intermediate_size": 100, "hidden_size": 72}], ids=["even", "odd"])
def model_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory, **request.param)
    return directory


@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("bfloat16", 1), ("float16", 1), ("float32", 2)])
def test_alone_batched_chunked_and_after_a_prefix_hit(model_path: Path, dtype: Any, threads: int) -> None:
    config = EngineConfig(
        model=str(model_path), device="cpu", dtype=dtype, threads=threads, max_num_seqs=8, block_size=4, kv_memory=1 << 20, deterministic=True
    )
    runner = ModelRunner(config)
    rng = random.Random(3)
    prompts = [[rng.randrange(126) for _ in range(length)] for length in (1, 2, 17, 39, 70)]

    def outcome(hand: Hand, name: str) -> tuple[list[int], list[TokenLogprobs]]:
        track = hand.tracks[name]
        return track.answer[:NEW], [entry for row in track.results for entry in row.logprobs or ()][:NEW]

    def run(chunk: int, *, together: bool) -> list[tuple[list[int], list[TokenLogprobs]]]:
        hand = Hand(runner)
        names = [str(index) for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            hand.add(name, prompt, PARAMS)
        for group in [names] if together else [[name] for name in names]:
            hand.finish(group, NEW, chunk=chunk)
        return [outcome(hand, name) for name in names]

    alone = run(10_000, together=False)
    assert all(len(entries) == NEW for _, entries in alone)
    for chunk in (10_000, 7, 16):
        assert run(chunk, together=True) == alone
    hand = Hand(runner)
    first = hand.add("first", prompts[-1][:50], PARAMS)
    hand.add("mate", prompts[2], PARAMS)
    hand.finish(["first", "mate"], 2, chunk=11)
    hit = hand.add("hit", prompts[-1], PARAMS)
    hit.blocks, hit.computed = first.blocks[:12], 48
    hand.finish(["mate", "hit"], NEW)
    assert outcome(hand, "hit") == alone[-1]


def test_tiles_have_one_shape_and_give_each_row_its_own() -> None:
    shapes = []

    def double(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x * 2

    for count in (1, TILE - 1, TILE, TILE + 1, 3 * TILE):
        x = torch.randn(count, 2, 3)
        assert torch.equal(tiled(double)(x), x * 2)
    assert set(shapes) == {(TILE, 2, 3)}
