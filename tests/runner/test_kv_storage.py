from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.runner import memory
from headrace.runner.device import resolve_device, resolve_dtype
from headrace.runner.kv_storage import DEFAULT_CPU_BYTES, KVShape, KVStorage, cpu_budget, size_storage

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype=torch.float32)
CONFIG = EngineConfig(model="m", block_size=4)
BLOCK = 2 * 2 * 4 * 3 * 8 * 4


def test_bytes_of_a_block() -> None:
    assert SHAPE.block_bytes == BLOCK
    assert replace(SHAPE, dtype=torch.bfloat16).block_bytes == BLOCK // 2
    storage = KVStorage(SHAPE, num_blocks=5, num_host_blocks=0, device=torch.device("cpu"))
    assert storage.num_bytes == sum(cache.nbytes for layer in storage.caches for cache in layer) == 5 * BLOCK


def test_sizes_from_the_budget() -> None:
    sizes = size_storage(replace(CONFIG, swap_space=3 * BLOCK + 1), SHAPE, model_limit=100, budget=25 * BLOCK + BLOCK - 1, available=None)
    assert (sizes.max_model_len, sizes.num_blocks, sizes.num_host_blocks) == (100, 25, 3)
    assert size_storage(replace(CONFIG, max_model_len=40), SHAPE, model_limit=100, budget=10 * BLOCK, available=None).max_model_len == 40


def test_an_override_serves_what_it_holds_and_keeps_the_models_limit() -> None:
    sizes = size_storage(replace(CONFIG, num_gpu_blocks_override=3), SHAPE, model_limit=100, budget=10**9, available=None)
    assert (sizes.max_model_len, sizes.num_blocks) == (100, 3)


@pytest.mark.parametrize(
    ("config", "budget", "message"),
    [
        (CONFIG, 24 * BLOCK, rf"holds 96 tokens.*--max-model-len 100: raise --kv-memory to {25 * BLOCK} bytes, or set --max-model-len to at most 96"),
        (replace(CONFIG, max_model_len=30), 7 * BLOCK, "holds 28 tokens.*--max-model-len 30"),
        (CONFIG, -5, r"holds 0 tokens.*bytes\.$"),
        (replace(CONFIG, num_gpu_blocks_override=3, max_model_len=13), 10**9, "holds 12 tokens.*raise --num-gpu-blocks-override to 4"),
        (replace(CONFIG, num_gpu_blocks_override=0), 10**9, "raise --num-gpu-blocks-override to 25"),
        (replace(CONFIG, max_model_len=101), 10**9, "--max-model-len 101 is beyond the 100 positions"),
        (replace(CONFIG, swap_space=-1), 10**9, "--swap-space must not be negative"),
        (replace(CONFIG, swap_space=5000), 10**9, "--swap-space asks for 5000 bytes of host memory, but only 4000"),
    ],
)
def test_a_start_that_cannot_work_says_what_to_raise(config: EngineConfig, budget: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size_storage(config, SHAPE, model_limit=100, budget=budget, available=4000)


def test_cpu_budget() -> None:
    assert cpu_budget(CONFIG, None) == DEFAULT_CPU_BYTES
    assert cpu_budget(CONFIG, 10 * DEFAULT_CPU_BYTES) == DEFAULT_CPU_BYTES
    assert cpu_budget(CONFIG, 1000) == 500
    assert cpu_budget(replace(CONFIG, kv_memory=77), 100) == 77
    with pytest.raises(ConfigError, match="--kv-memory asks for 101 bytes, but only 100"):
        cpu_budget(replace(CONFIG, kv_memory=101), 100)


def filled() -> KVStorage:
    """Every element of device block b is b, in keys; -b in values."""
    storage = KVStorage(SHAPE, num_blocks=6, num_host_blocks=4, device=torch.device("cpu"))
    for keys, values in storage.caches:
        for block in range(6):
            keys[block], values[block] = float(block), -float(block)
    return storage


def contents(storage: KVStorage) -> list[float]:
    for keys, values in storage.caches:
        assert torch.equal(keys, -values)
        assert torch.equal(keys, keys[:, :1, :1, :1].expand_as(keys))
        assert torch.equal(keys, storage.caches[0][0])
    return storage.caches[0][0][:, 0, 0, 0].tolist()


def test_copies_read_every_source_first() -> None:
    storage = filled()
    storage.copy(((1, 2), (2, 3), (1, 5)))
    assert contents(storage) == [0, 1, 1, 2, 4, 1]
    storage.copy(())
    assert contents(storage) == [0, 1, 1, 2, 4, 1]


def test_swapping_out_and_in_again_elsewhere() -> None:
    storage = filled()
    storage.swap_out(((4, 0), (1, 3)))
    storage.copy(((0, 4), (0, 1)))
    storage.swap_in(((3, 5), (0, 1)))
    assert contents(storage) == [0, 4, 2, 3, 0, 1]


def test_memory_and_cores_of_this_machine() -> None:
    available = memory.available_host_memory()
    assert available is None or 0 < available < 1 << 50
    assert memory.physical_cores() >= 1


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_available_on_machine", lambda: 10_000)
    assert memory.available_host_memory() == 10_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_host_memory() == 10_000
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    assert memory.available_host_memory() == 2500


def test_dtype() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", cpu, torch.bfloat16) is torch.float32
    assert resolve_dtype("auto", cuda, torch.bfloat16) is torch.bfloat16
    assert resolve_dtype("float16", cpu, torch.bfloat16) is torch.float16


def test_device() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("tpu", "mps", "cuda:99", "cuda:-1x"):
        with pytest.raises(ConfigError, match=f"--device {name}"):
            resolve_device(name)
