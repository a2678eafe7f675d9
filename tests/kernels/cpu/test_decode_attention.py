"""Attention of tokens that the model made, each by itself, from caches of 16-bit values: its numbers, whatever is computed beside."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import cpu
from tests.kernels.cpu.test_tile_attention import HEADS, OPTIONS, SCALE, amx, attend
from tests.kernels.test_attention import Batch

__all__ = ["amx"]  # a fixture for each test here

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # what the result's own rounding takes


def decoded(batch: Batch, **options) -> torch.Tensor:
    return attend(batch, [0] * len(batch.query_lens), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS[:5], ids=str)
def test_matches_the_oracle(heads, options):
    """Lengths around a vector, a tile and a part; unwritten places hold NaN, and table entries past a context point outside of the cache."""
    for dtype, rows in ((torch.bfloat16, [(1, 1), (1, 15), (1, 64), (2, 65)]), (torch.float16, [(1, 17), (3, 514)])):
        batch = Batch(rows, dtype=dtype, **heads)
        assert (decoded(batch, **options).double() - batch.oracle(**options)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}], ids=str)
@pytest.mark.parametrize("rows", [[(1, 700)], [(1, 700), (1, 3), (4, 90)], [(1, 700)] * 12])
def test_a_token_does_not_depend_on_what_is_beside_it(rows, options):
    """Alone, in a batch, behind a prompt's tokens, as one of several guesses, and whatever the number of threads."""
    batch = Batch([(6, 700), *rows[1:]], dtype=torch.float16, **HEADS[0])
    row = batch.query_lens.index(6)
    first = sum(batch.query_lens[:row])
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(decoded(batch, **options))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    some = attend(batch, [2 * (count == 6) for count in batch.query_lens], **options)
    assert torch.equal(some[first + 2 :], results[0][first + 2 :])
    assert not torch.equal(some[first : first + 2], results[0][first : first + 2]), "a prompt's tokens are rounded otherwise"
    alone = Batch([(1, 700)], dtype=torch.float16, **HEADS[0])
    alone.q, alone.k_cache, alone.v_cache = batch.q[first + 5 : first + 6], batch.k_cache, batch.v_cache
    alone.block_tables = batch.block_tables[row : row + 1]
    assert torch.equal(decoded(alone, **options), results[0][first + 5 : first + 6])


def test_float32_caches_keep_the_order_of_sums_that_prompts_have():
    """Without tiles and with them: a long prompt's last token and a decode row of the same numbers agree to the bit."""
    batch = Batch([(1, 300)], dtype=torch.float32, **HEADS[0])
    plain = attend(batch, [0])
    assert torch.equal(plain, cpu.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.meta(), scale=SCALE))
