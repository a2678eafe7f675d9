"""The paged storage of keys and values: sized once at the start, never grown.

Legend: N blocks, S tokens of a block, K key/value heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.errors import ConfigError

DEFAULT_CPU_BYTES = 512 * 1024 * 1024
KVCaches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one token of one model takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSizes:
    max_model_len: int  # tokens
    num_blocks: int
    num_host_blocks: int


def size_storage(config: EngineConfig, shape: KVShape, *, model_limit: int, budget: int, available: int | None) -> KVSizes:
    """How many blocks `budget` bytes give, and the longest request that the start promises.

    `model_limit` is the most positions the model knows; `available` the bytes of host memory (None: not known), which limits the swap
    space. Raises `ConfigError` where one request of the longest length does not fit. With `num_gpu_blocks_override` and no
    `max_model_len` of the user's the limit stays the model's own, and requests that do not fit are refused one by one.
    """
    max_model_len = config.max_model_len or model_limit
    if max_model_len > model_limit:
        raise ConfigError(f"--max-model-len {max_model_len} is beyond the {model_limit} positions that this model knows; lower it to {model_limit}.")
    override = config.num_gpu_blocks_override
    num_blocks = budget // shape.block_bytes if override is None else override
    capacity = max(0, num_blocks) * shape.block_size
    promised = config.max_model_len is not None or override is None
    if num_blocks < 1 or (promised and capacity < max_model_len):
        needed = -(-max_model_len // shape.block_size)
        advice = f"--num-gpu-blocks-override to {needed}" if override is not None else f"--kv-memory to {needed * shape.block_bytes} bytes"
        lower = f", or set --max-model-len to at most {capacity}" if capacity else ""
        raise ConfigError(
            f"The KV storage holds {capacity} tokens, which does not fit one request of --max-model-len {max_model_len}: raise {advice}{lower}."
        )
    if config.swap_space < 0:
        raise ConfigError(f"--swap-space must not be negative, not {config.swap_space}.")
    if available is not None and config.swap_space > available:
        raise ConfigError(f"--swap-space asks for {config.swap_space} bytes of host memory, but only {available} are available.")
    return KVSizes(max_model_len=max_model_len, num_blocks=num_blocks, num_host_blocks=config.swap_space // shape.block_bytes)


class KVStorage:
    """Device blocks, and host blocks for swapped requests.

    `caches`: for each layer keys and values, each [N, S, K, D] in `shape.dtype`, contiguous. The pages of host memory are taken from
    the system when they are first written.
    """

    def __init__(self, shape: KVShape, *, num_blocks: int, num_host_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.device = device
        self.caches = self._allocate(num_blocks, device=device, pinned=False)
        pinned = device.type == "cuda"
        self._host = self._allocate(num_host_blocks, device=torch.device("cpu"), pinned=pinned) if num_host_blocks else []

    @property
    def num_bytes(self) -> int:
        """Bytes of the device blocks."""
        return self.num_blocks * self.shape.block_bytes

    def _allocate(self, num_blocks: int, *, device: torch.device, pinned: bool) -> KVCaches:
        shape = self.shape
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)

        def empty() -> Tensor:
            return torch.empty(size, dtype=shape.dtype, device=device, pin_memory=pinned)

        return [(empty(), empty()) for _ in range(shape.num_layers)]

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(device block, host block) pairs."""
        self._transfer(self.caches, self._host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(host block, device block) pairs."""
        self._transfer(self._host, self.caches, pairs)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(from device block, to device block) pairs; every source is read before any target is written."""
        self._transfer(self.caches, self.caches, pairs)

    def read_block(self, block: int) -> bytes:
        """What a device block holds: keys, then values, layer by layer."""
        return b"".join(cache[block].contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for layer in self.caches for cache in layer)

    def write_block(self, block: int, data: bytes) -> None:
        """Fill a device block with what `read_block` gave. ValueError where the length is another."""
        if len(data) != self.shape.block_bytes:
            raise ValueError(f"a block has {self.shape.block_bytes} bytes, not {len(data)}")
        parts = torch.frombuffer(bytearray(data), dtype=torch.uint8).chunk(2 * self.shape.num_layers)
        caches = [cache for layer in self.caches for cache in layer]
        for cache, part in zip(caches, parts, strict=True):
            cache[block].copy_(part.clone().view(cache.dtype).view(cache[block].shape))

    @staticmethod
    def _transfer(source: KVCaches, target: KVCaches, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        from_index = torch.tensor([pair[0] for pair in pairs], dtype=torch.int64).to(source[0][0].device)
        to_index = torch.tensor([pair[1] for pair in pairs], dtype=torch.int64).to(target[0][0].device)
        for from_layer, to_layer in zip(source, target, strict=True):
            for from_cache, to_cache in zip(from_layer, to_layer, strict=True):
                to_cache.index_copy_(0, to_index, from_cache.index_select(0, from_index).to(to_cache.device))


def cpu_budget(config: EngineConfig, available: int | None) -> int:
    """Bytes of KV storage on CPU, of `available` ones (None: not known).

    Raises `ConfigError` where the machine has less than `--kv-memory` left.
    """
    if config.kv_memory is None:
        return DEFAULT_CPU_BYTES if available is None else min(DEFAULT_CPU_BYTES, available // 2)
    if available is not None and config.kv_memory > available:
        raise ConfigError(f"--kv-memory asks for {config.kv_memory} bytes, but only {available} are available.")
    return config.kv_memory
