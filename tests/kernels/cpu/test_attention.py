"""Paged attention of the CPU kernels against the oracle, and against itself under other batchings, chunkings and thread counts."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from headrace.kernels import cpu
from headrace.kernels.attention import AttentionMetadata
from tests.kernels.test_attention import Batch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HEADS = (
    {},
    {"head_dim": 64, "kv_heads": 3, "group": 3, "block_size": 16},
    {"head_dim": 80, "kv_heads": 1, "group": 8},
    {"head_dim": 128, "kv_heads": 2, "group": 1, "block_size": 32},
)
KINDS = (
    (torch.float32, {}),
    (torch.float32, {"sliding_window": 7}),
    (torch.float32, {"logit_softcap": 2.0}),
    (torch.bfloat16, {"sliding_window": 70, "logit_softcap": 2.0}),
    (torch.float16, {}),
)


def attend(batch: Batch, **options) -> torch.Tensor:
    return cpu.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.meta(), scale=0.3, **options)


@cache
def solved(heads: int, kind: int) -> tuple[Batch, torch.Tensor]:
    """A batch and what the oracle says, once for all instruction sets."""
    dtype, options = KINDS[kind]
    batch = Batch([(1, 1), (1, 70), (5, 5), (9, 139)], dtype=dtype, **HEADS[heads])
    return batch, batch.oracle(**options)


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[f"{dtype} {options}" for dtype, options in KINDS])
@pytest.mark.parametrize("heads", range(len(HEADS)), ids=map(str, HEADS))
def test_matches_the_oracle(isa, heads, kind):
    """Blocks in any order; unwritten places hold NaN, and table entries past a context point outside of the cache."""
    batch, want = solved(heads, kind)
    dtype, options = KINDS[kind]
    assert (attend(batch, **options).double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 600}], ids=str)
def test_contexts_of_several_parts(isa, options):
    batch = Batch([(1, 1300), (2, 513), (1, 512)], kv_heads=1, group=2)
    assert (attend(batch, **options).double() - batch.oracle(**options)).abs().max() < 1e-5


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}], ids=str)
def test_a_token_does_not_depend_on_batch_chunks_or_threads(isa, options):
    """One row of 1,200 tokens: computed at once, in chunks, and token by token beside other rows."""
    batch = Batch([(1200, 1200)], kv_heads=1, group=3, block_size=16)
    table = torch.tensor(batch.block_tables * 8, dtype=torch.int32)

    def run(rows: list[tuple[int, int]]) -> torch.Tensor:
        """rows: (first token, last token + 1) of the one context."""
        lens = [last - first for first, last in rows]
        meta = AttentionMetadata(
            query_start_R1=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
            context_len_R=torch.tensor([last for _, last in rows], dtype=torch.int32),
            block_table_RB=table[: len(rows)],
            slot_mapping_T=torch.zeros(sum(lens), dtype=torch.int64),
            positions_T=torch.zeros(sum(lens), dtype=torch.int64),
            query_lens=lens,
            context_lens=[last for _, last in rows],
            num_decode_rows=lens.count(1),
        )
        q = torch.cat([batch.q[first:last] for first, last in rows])
        return cpu.paged_attention(q, batch.k_cache, batch.v_cache, meta, scale=0.3, **options)

    whole = run([(0, 1200)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert torch.equal(run([(0, 1200)]), whole)
            assert torch.equal(torch.cat([run([(first, min(first + 333, 1200))]) for first in range(0, 1200, 333)]), whole)
            assert torch.equal(run([(1199, 1200)]), whole[1199:])
            singles = (3, 511, 512, 513, 700, 1100, 1199)
            assert torch.equal(run([(p, p + 1) for p in singles]), whole[list(singles)])
    finally:
        torch.set_num_threads(before)


def test_wrong_sizes_are_refused(kernels):
    batch = Batch([(1, 4)], head_dim=24)
    with pytest.raises(RuntimeError, match="multiple of 16, not 24"):
        attend(batch)
    batch = Batch([(1, 9)])
    meta = batch.meta()
    meta.context_len_R = torch.tensor([13], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="context of 13, and its block table holds 12"):
        cpu.paged_attention(batch.q, batch.k_cache, batch.v_cache, meta, scale=1.0)
    with pytest.raises(RuntimeError, match="differ in shape"):
        cpu.paged_attention(batch.q, batch.k_cache, batch.v_cache[:1], batch.meta(), scale=1.0)
