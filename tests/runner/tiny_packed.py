"""A tiny random llama in GGUF blocks, which our CPU kernels compute with, and steps over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import cpu
from headrace.kernels.attention import AttentionMetadata
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from tests.models.gguf_writer import write_gguf
from tests.models.tiny_models import make

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
BLOCK_SIZE = 4
PROMPT = 20  # tokens of each row's prompt


def kernels_or_skip() -> cpu.CpuKernels:
    loaded = cpu.load()
    if loaded is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    return loaded


def write_tiny(path: Path, *, quantization: str = "Q8_0", **changes: Any) -> Path:
    write_gguf(make("LlamaConfig", SIZES | changes), path, "llama", quantization=quantization)
    return path


def load_tiny(path: Path) -> Decoder:
    return load_model(str(path), dtype=torch.float32, device=torch.device("cpu"), packed=True)


def new_caches(model: Decoder, num_blocks: int = 32) -> list[tuple[Tensor, Tensor]]:
    """NaN wherever nothing was written: reading it shows."""
    size = (num_blocks, BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim)
    return [(torch.full(size, float("nan")), torch.full(size, float("nan"))) for _ in range(model.config.num_layers)]


def step(rows: list[tuple[int, int]], *, seed: int = 0) -> tuple[Tensor, AttentionMetadata]:
    """Token ids and places of a step over rows of (first position, tokens); row i owns the blocks 8 i .. 8 i + 7. Single tokens come first."""
    rows = sorted(rows, key=lambda row: row[1] != 1)
    counts = [count for _, count in rows]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(first, first + count) for first, count in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
    meta = AttentionMetadata(
        query_start_R1=starts,
        context_len_R=torch.tensor([first + count for first, count in rows], dtype=torch.int32),
        block_table_RB=(torch.arange(8)[None] + 8 * torch.arange(len(rows))[:, None]).to(torch.int32),
        slot_mapping_T=(8 * owner + positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE,
        positions_T=positions,
        query_lens=counts,
        context_lens=[first + count for first, count in rows],
        num_decode_rows=counts.count(1),
        prompt_tokens_R=torch.tensor([min(max(PROMPT - first, 0), count) for first, count in rows], dtype=torch.int32),
    )
    ids = torch.randint(0, SIZES["vocab_size"], (sum(counts),), generator=torch.Generator().manual_seed(seed))
    return ids, meta
