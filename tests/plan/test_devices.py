from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.core.step_work import StepWork
from headrace.plan.devices import BANDWIDTH_SHARE, COMPUTE_SHARE, DEVICES, OVERHEAD_S, RooflineCosts, kv_blocks, model_size

LLAMA_8B = SimpleNamespace(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)


def test_the_size_of_a_known_model() -> None:
    size = model_size(LLAMA_8B, dtype="bfloat16", kv_dtype="bfloat16")
    assert size.layer_weights + size.head_weights + size.embedding_weights == pytest.approx(8.03e9, rel=0.001)
    assert size.kv_bytes == 131_072
    assert model_size(LLAMA_8B, dtype="float32", kv_dtype="float16").memory == 2 * size.memory


def test_one_decode_waits_for_the_weights_and_a_long_prompt_for_the_products() -> None:
    device, size = DEVICES["h100"], model_size(LLAMA_8B, dtype="bfloat16", kv_dtype="bfloat16")
    costs = RooflineCosts(device=device, model=size)
    weights = 2 * (size.layer_weights + size.head_weights)
    assert costs.seconds(StepWork(1, 0, 0, 0, 1)) == pytest.approx(OVERHEAD_S + weights / (3.35e12 * BANDWIDTH_SHARE))
    operations = 2 * (size.layer_weights * 2048 + size.head_weights) + 4 * 32 * 128 * 32 * 2048 * 2048
    assert costs.seconds(StepWork(0, 0, 2048, 2048 * 2048, 1)) == pytest.approx(OVERHEAD_S + operations / (989e12 * COMPUTE_SHARE))
    longer = costs.seconds(StepWork(8, 80_000, 0, 0, 8)) - costs.seconds(StepWork(8, 0, 0, 0, 8))
    assert longer == pytest.approx(80_000 * size.kv_bytes / (3.35e12 * BANDWIDTH_SHARE))


def test_blocks_fill_what_the_weights_leave() -> None:
    size = model_size(LLAMA_8B, dtype="bfloat16", kv_dtype="bfloat16")
    blocks = kv_blocks(DEVICES["h100"], size, block_size=16, memory_share=0.9, kv_memory=None)
    assert blocks * 16 * size.kv_bytes == pytest.approx(0.85 * 80e9 - size.memory, rel=0.001)
    assert kv_blocks(DEVICES["t4"], size, block_size=16, memory_share=0.9, kv_memory=None) <= 0
    assert kv_blocks(DEVICES["t4"], size, block_size=16, memory_share=0.9, kv_memory=1 << 30) == 512
