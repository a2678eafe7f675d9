"""Blocks of a real model over a restart: bit for bit, and the same answer from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.messages import AddRequest
from headrace.core.scheduler import Scheduler
from headrace.engine.engine_host import scheduler_config
from headrace.engine.session_store import SessionStore
from headrace.runner.kv_storage import KVShape, KVStorage
from headrace.runner.model_runner import ModelRunner
from tests.runner.tiny_model import GREEDY, save_tiny_llama


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_goes_out_and_in_bit_for_bit(dtype: torch.dtype) -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    storage = KVStorage(shape, num_blocks=3, num_host_blocks=0, device=torch.device("cpu"))
    for layer in storage.caches:
        for cache in layer:
            cache.copy_(torch.randn(cache.shape))
    before = [cache.clone() for layer in storage.caches for cache in layer]
    data = storage.read_block(1)
    assert len(data) == shape.block_bytes
    storage.write_block(2, data)
    for cache, old in zip((cache for layer in storage.caches for cache in layer), before, strict=True):
        assert torch.equal(cache[2].view(torch.uint8), old[1].view(torch.uint8))
        assert torch.equal(cache[:2], old[:2])
    with pytest.raises(ValueError, match="bytes"):
        storage.write_block(0, data[:-1])


class Life:
    """One engine without its process."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self.runner = ModelRunner(config)
        self.scheduler = Scheduler(scheduler_config(config, self.runner.info(0.0), num_host_blocks=0))
        self.store = SessionStore(str(directory), quota=10**9, kv=self.scheduler.kv, runner=self.runner, clock=lambda: 0.0, wall=lambda: 0.0)
        self.num_restored = self.store.load()

    def answer(self, prompt: tuple[int, ...]) -> tuple[list[int], int | None]:
        message = AddRequest(request_id="r", prompt_token_ids=prompt, params=replace(GREEDY, max_tokens=12), arrival=0.0, session_id="s")
        assert self.scheduler.add(message, 0.0) is None
        tokens: list[int] = []
        cached = None
        while (plan := self.scheduler.plan(0.0)) is not None:
            for output in self.scheduler.update(self.runner.execute(plan), 0.0):
                tokens += output.token_ids
                cached = cached if output.cached_tokens is None else output.cached_tokens
        self.scheduler.check()
        return tokens, cached


def test_a_restarted_engine_answers_from_the_blocks_of_the_earlier_one(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    config = EngineConfig(
        model=str(tmp_path / "model"), device="cpu", threads=1, max_num_seqs=2, max_num_batched_tokens=256, block_size=4, num_gpu_blocks_override=64
    )
    prompt = tuple(index * 7 % 120 for index in range(50))
    first = Life(config, tmp_path / "sessions")
    answer, cached = first.answer(prompt)
    assert (len(answer), cached, first.num_restored) == (12, 0, 0)
    turn = (*prompt, *answer, 5, 6, 7)
    warm = first.answer(turn)
    assert first.store.save() == 1
    second = Life(config, tmp_path / "sessions")
    assert second.num_restored == 1
    assert second.answer(turn) == (warm[0], 64), "all full blocks of the turn"
    cold = Life(config, tmp_path / "none")
    assert cold.answer(turn) == (warm[0], 0)
    assert warm[1] == 60
    (tmp_path / "other").mkdir()
    save_tiny_llama(tmp_path / "other", initializer_range=0.1)
    assert Life(replace(config, model=str(tmp_path / "other")), tmp_path / "sessions").num_restored == 0
    assert Life(replace(config, dtype="bfloat16"), tmp_path / "sessions").num_restored == 0
