"""Paged attention against the oracle, against contiguous SDPA, and against itself under other batchings."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import attention
from headrace.kernels.attention import AttentionMetadata, paged_attention, write_kv
from headrace.kernels.reference import reference_paged_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Batch:
    """Random rows over a pool, shuffled where `seed` is even, whose unused places hold NaN: reading one shows."""

    def __init__(self, rows: list[tuple[int, int]], *, kv_heads=2, group=2, head_dim=16, block_size=4, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rows = sorted(rows, key=lambda row: row[0] != 1)
        self.query_lens, self.context_lens = [row[0] for row in rows], [row[1] for row in rows]
        needed = [-(-context // block_size) for context in self.context_lens]
        pool = list(range(sum(needed) + 3))
        if seed % 2 == 0:  # else blocks follow each other, which needs no copy of keys and values
            random.Random(seed).shuffle(pool)
        ends = list(accumulate(needed))
        self.block_tables = [pool[end - count : end] for end, count in zip(ends, needed, strict=True)]
        shape = (len(pool), block_size, kv_heads, head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        self.k, self.v = [], []
        for table, context in zip(self.block_tables, self.context_lens, strict=True):
            k, v = (torch.randn(context, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(context)])
            write_kv(k, v, self.k_cache, self.v_cache, slots)
            self.k.append(k)
            self.v.append(v)
        self.q = torch.randn(sum(self.query_lens), kv_heads * group, head_dim, generator=generator).to(dtype)
        self.block_size = block_size

    def meta(self, deterministic: bool = False) -> AttentionMetadata:
        width = max(len(table) for table in self.block_tables)
        out_of_reach = 2**30  # an entry past the context must not be read
        positions = [p for n, c in zip(self.query_lens, self.context_lens, strict=True) for p in range(c - n, c)]
        rows = [row for row, n in enumerate(self.query_lens) for _ in range(n)]
        size = self.block_size
        return AttentionMetadata(
            query_start_R1=torch.tensor([0, *accumulate(self.query_lens)], dtype=torch.int32),
            context_len_R=torch.tensor(self.context_lens, dtype=torch.int32),
            block_table_RB=torch.tensor([t + [out_of_reach] * (width - len(t)) for t in self.block_tables], dtype=torch.int32),
            slot_mapping_T=torch.tensor([self.block_tables[r][p // size] * size + p % size for r, p in zip(rows, positions, strict=True)]),
            positions_T=torch.tensor(positions),
            query_lens=list(self.query_lens),
            context_lens=list(self.context_lens),
            num_decode_rows=self.query_lens.count(1),
            deterministic=deterministic,
        )

    def run(self, *, deterministic: bool = False, **options) -> torch.Tensor:
        return paged_attention(self.q, self.k_cache, self.v_cache, self.meta(deterministic), scale=0.3, **options)

    def oracle(self, **options) -> torch.Tensor:
        return reference_paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            block_tables=self.block_tables,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            scale=0.3,
            **options,
        )


rows_strategy = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5]), st.integers(0, 40)).map(lambda r: (r[0], r[0] + r[1])), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    rows=rows_strategy,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(list(TOLERANCE)),
    window=st.sampled_from([None, 1, 3, 16]),
    softcap=st.sampled_from([None, 2.0]),
    deterministic=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_the_oracle(rows, kv_heads, group, block_size, dtype, window, softcap, deterministic, seed):
    batch = Batch(rows, kv_heads=kv_heads, group=group, head_dim=8, block_size=block_size, dtype=dtype, seed=seed)
    got = batch.run(deterministic=deterministic, sliding_window=window, logit_softcap=softcap)
    want = batch.oracle(sliding_window=window, logit_softcap=softcap)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [[(1, 300), (1, 7), (1, 290), (1, 64), (1, 1)], [(200, 200), (1, 500), (64, 333)]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_equals_contiguous_sdpa(rows, deterministic):
    batch = Batch(rows, kv_heads=3, group=3, head_dim=32, block_size=16)
    got = batch.run(deterministic=deterministic)
    token = 0
    for row, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        q = batch.q[token : token + queries].transpose(0, 1)
        k, v = (x[row].transpose(0, 1).repeat_interleave(3, dim=0) for x in (batch.k, batch.v))
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        want = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=0.3)[0].transpose(0, 1)
        torch.testing.assert_close(got[token : token + queries], want, atol=2e-5, rtol=2e-5)
        token += queries


def test_a_long_softcapped_chunk_is_computed_in_slices(monkeypatch):
    rows = [(40, 40), (30, 50)]
    whole = Batch(rows).run(logit_softcap=3.0, sliding_window=None)
    monkeypatch.setattr(attention, "_SOFTCAP_QUERY_SLICE", 7)
    torch.testing.assert_close(Batch(rows).run(logit_softcap=3.0), whole, atol=1e-6, rtol=1e-6)


def test_groups_are_bounded_in_work_space_and_padding(monkeypatch):
    monkeypatch.setattr(attention, "_MAX_GATHERED_TOKENS", 64)
    batch = Batch([(1, n) for n in (30, 31, 32, 100, 5, 29)])
    layout = batch.meta().layout(sliding_window=None, dtype=torch.float32, block_size=4)
    rows_and_sizes = [(group.last - group.first, group.slots.numel()) for group in layout.groups]
    assert rows_and_sizes == [(1, 100), (2, 64), (2, 60), (1, 5)]
    assert (batch.run().double() - batch.oracle()).abs().max() < 2e-5


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 4000), max_size=40), deterministic=st.booleans())
def test_partition_covers_every_row_once_with_little_padding(lengths, deterministic):
    order, bounds, padded = attention._partition(lengths, deterministic=deterministic)
    assert sorted(order) == list(range(len(lengths)))
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert len(padded) == len(bounds) - 1
    for first, last, length in zip(bounds, bounds[1:], padded, strict=False):
        assert last > first
        for i in order[first:last]:
            if deterministic:
                assert length == attention._padded_length(lengths[i])
            assert lengths[i] <= length <= lengths[i] + max(64 if deterministic else 32, length // 4)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("options", [{}, {"sliding_window": 50}, {"logit_softcap": 5.0}])
def test_deterministic_tokens_do_not_depend_on_the_batch(dtype, options):
    """The same context in one prefill, in chunks, token by token and beside other rows gives the same bits."""
    context = 150
    whole = Batch([(context, context)], kv_heads=3, group=3, head_dim=64, block_size=16, dtype=dtype)
    want = whole.run(deterministic=True, **options)
    k_cache, v_cache = whole.k_cache, whole.v_cache
    for sizes in ([64, 64, 22], [1] * context):
        first = 0
        for size in sizes:
            part = Batch([(size, first + size)], kv_heads=3, group=3, head_dim=64, block_size=16, dtype=dtype)
            part.k_cache, part.v_cache, part.block_tables = k_cache, v_cache, whole.block_tables
            part.q = whole.q[first : first + size]
            assert torch.equal(part.run(deterministic=True, **options), want[first : first + size])
            first += size
    crowd = Batch([(1, n) for n in (150, 140, 149, 33)], kv_heads=3, group=3, head_dim=64, block_size=16, dtype=dtype, seed=5)
    crowd.k_cache, crowd.v_cache = (torch.cat(pair) for pair in ((crowd.k_cache, k_cache), (crowd.v_cache, v_cache)))
    offset = len(crowd.k_cache) - len(k_cache)
    crowd.block_tables[2] = [block + offset for block in whole.block_tables[0]]
    crowd.q[2] = whole.q[148]
    assert torch.equal(crowd.run(deterministic=True, **options)[2], want[148])


def test_a_row_of_nan_leaves_its_batch_mates_alone():
    rows = [(1, 20), (1, 33), (1, 40), (6, 19)]
    clean = Batch(rows)
    want = clean.run()
    torn = Batch(rows)
    torn.k_cache[torn.block_tables[1][0], 2] = float("nan")
    torn.v_cache[torn.block_tables[1][0], 1] = float("inf")
    got = torn.run()
    assert not got[1].isfinite().all()
    for token in (0, 2, *range(3, 9)):
        torch.testing.assert_close(got[token], want[token], atol=1e-6, rtol=1e-6)


def test_write_kv_converts_to_the_storage_dtype():
    caches = [torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    write_kv(k, v, *caches, torch.tensor([9, 0]))
    assert torch.equal(caches[0].view(12, 2, 8)[[9, 0]], k.bfloat16())
    assert torch.equal(caches[1].view(12, 2, 8)[[9, 0]], v.bfloat16())
    assert caches[0].float().abs().sum() == pytest.approx(k.bfloat16().float().abs().sum().item(), rel=1e-3)
