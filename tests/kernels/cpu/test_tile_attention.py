"""Attention of prompt tokens by AMX tiles: its numbers, and that a token's don't depend on what is computed beside it."""

from __future__ import annotations

import itertools

import pytest
import torch

from headrace.kernels import cpu
from headrace.kernels.attention import AttentionMetadata
from tests.kernels.test_attention import Batch

PART = 512  # positions of one softmax, kPart of the kernels
SCALE = 0.3
HEADS = (
    {"head_dim": 64, "kv_heads": 3, "group": 3, "block_size": 16},
    {"head_dim": 16, "kv_heads": 1, "group": 1, "block_size": 1},
    {"head_dim": 48, "kv_heads": 2, "group": 5, "block_size": 4},
    {"head_dim": 80, "kv_heads": 1, "group": 8, "block_size": 4},
    {"head_dim": 128, "kv_heads": 2, "group": 1, "block_size": 32},
    {"head_dim": 256, "kv_heads": 1, "group": 40, "block_size": 16},
)
OPTIONS = ({}, {"sliding_window": 1}, {"sliding_window": 70}, {"logit_softcap": 2.0}, {"sliding_window": 530, "logit_softcap": 5.0})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def amx():
    if cpu.load("amx") is None:
        pytest.skip(f"no tiles: {cpu.reason()}")
    yield
    cpu.load()


def attend(batch: Batch, prompt_tokens: list[int] | None = None, **options) -> torch.Tensor:
    """prompt_tokens: how many of each row's tokens are of its prompt; default all."""
    meta = batch.meta()
    meta.prompt_tokens_R = torch.tensor(batch.query_lens if prompt_tokens is None else prompt_tokens, dtype=torch.int32)
    return cpu.paged_attention(batch.q, batch.k_cache, batch.v_cache, meta, scale=SCALE, prompts_in_bfloat16=True, **options)


def in_bfloat16(batch: Batch, *, sliding_window: int | None = None, logit_softcap: float | None = None) -> torch.Tensor:
    """The definition in float64, with queries, keys, values and the weights of each part rounded to bfloat16 first."""
    out = []
    for row, q in enumerate(batch.q.split(batch.query_lens)):
        q_HTD = (q.float() * SCALE).bfloat16().double().transpose(0, 1)
        group = q_HTD.shape[0] // batch.k[row].shape[1]
        k_HSD, v_HSD = (x[row].bfloat16().double().transpose(0, 1).repeat_interleave(group, dim=0) for x in (batch.k, batch.v))
        scores = q_HTD @ k_HSD.transpose(1, 2)
        if logit_softcap is not None:
            scores = logit_softcap * torch.tanh(scores / logit_softcap)
        queries, context = scores.shape[1:]
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        if sliding_window is not None:
            mask &= ~torch.ones_like(mask).tril(context - queries - sliding_window)
        scores = scores.masked_fill(~mask, float("-inf"))
        largest = scores.amax(dim=-1, keepdim=True)
        sums, total = torch.zeros_like(q_HTD), torch.zeros_like(largest)
        for first in range(0, context, PART):
            part = scores[..., first : first + PART]
            of_part = part.amax(dim=-1, keepdim=True).clamp(min=-1e30)
            weights = (part - of_part).exp().bfloat16().double() * (of_part - largest).exp()
            sums += weights @ v_HSD[:, first : first + PART]
            total += weights.sum(dim=-1, keepdim=True)
        out.append((sums / total).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_matches_the_definition_with_rounded_numbers(heads, options):
    """Lengths around a tile, a block of rows and a part. What is left: a weight that lies between two numbers of bfloat16 may go to either."""
    for dtype, rows in zip(DTYPES, ([(1, 1), (16, 63), (64, 64), (5, 65)], [(17, 511), (3, 514)], [(33, 513), (1, 512), (2, 1030)]), strict=True):
        batch = Batch(rows, dtype=dtype, **heads)
        got, want = attend(batch, **options), in_bfloat16(batch, **options)
        assert got.dtype == dtype
        of_output = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # what the result's own rounding takes
        error = (got.double() - want).abs() - of_output * want.abs()
        assert error.max() < 2**-8 * 4  # one step of one weight, times how far values lie apart
        assert error.clamp(min=0).mean() < 1e-5


@pytest.mark.parametrize("options", [{}, {"sliding_window": 7}, {"logit_softcap": 2.0}], ids=str)
@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_is_near_the_oracle(heads, options):
    """Scores here are of size 2: rounding both factors of a product to 8 bits moves them by up to a hundredth."""
    batch = Batch([(1, 1), (1, 70), (5, 5), (9, 139)], **heads)
    error = (attend(batch, **options).double() - batch.oracle(**options)).abs()
    assert error.max() < 3e-2
    assert error.mean() < 3e-3


def pieces(cuts: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"logit_softcap": 5.0}], ids=str)
@pytest.mark.parametrize("group", [1, 3, 16])
def test_a_token_does_not_depend_on_batch_chunks_or_threads(group, options):
    """A prompt of 1,200 tokens: at once, in chunks of any size, and token by token beside other rows."""
    last = 1200
    batch = Batch([(last, last)], kv_heads=2, group=group, head_dim=32, block_size=16, dtype=torch.bfloat16)
    table = torch.tensor(batch.block_tables * 16, dtype=torch.int32)

    def run(rows: list[tuple[int, int]], generated: int = 0) -> torch.Tensor:
        """rows: (first token, last token + 1) of the one context; `generated` rows follow, whose one token is not of the prompt."""
        rows = rows + [(last - 1, last)] * generated
        lens = [end - begin for begin, end in rows]
        meta = AttentionMetadata(
            query_start_R1=torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
            context_len_R=torch.tensor([end for _, end in rows], dtype=torch.int32),
            block_table_RB=table[: len(rows)],
            slot_mapping_T=torch.zeros(sum(lens), dtype=torch.int64),
            positions_T=torch.zeros(sum(lens), dtype=torch.int64),
            query_lens=lens,
            context_lens=[end for _, end in rows],
            num_decode_rows=0,
            prompt_tokens_R=torch.tensor(lens[: len(rows) - generated] + [0] * generated, dtype=torch.int32),
        )
        q = torch.cat([batch.q[begin:end] for begin, end in rows])
        out = cpu.paged_attention(q, batch.k_cache, batch.v_cache, meta, scale=SCALE, prompts_in_bfloat16=True, **options)
        return out[: sum(lens) - generated]

    whole = run([(0, last)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert torch.equal(run([(0, last)]), whole)
            for size in (333, 128, 41):
                parts = pieces([*range(0, last, size), last])
                assert torch.equal(torch.cat([run([part], generated=2) for part in parts]), whole)
            assert torch.equal(run([(last - 1, last)]), whole[-1:])
            singles = (3, 31, 32, 63, 64, 511, 512, 513, 700, 1100, 1199)
            assert torch.equal(run([(p, p + 1) for p in singles], generated=1), whole[list(singles)])
            assert torch.equal(run([(600, 650), (0, 7), (511, 514)]), torch.cat([whole[600:650], whole[:7], whole[511:514]]))
    finally:
        torch.set_num_threads(before)


def test_generated_tokens_are_those_of_the_kernels_without_tiles():
    """In a row with the end of its prompt, beside prompts, or alone."""
    batch = Batch([(1, 90), (1, 70), (9, 139), (5, 5), (40, 80)], kv_heads=3, group=3, head_dim=64, block_size=16)
    counts = [0, 1, 4, 0, 40]
    prompts, generated, mixed = attend(batch), attend(batch, [0] * 5), attend(batch, counts)
    assert not torch.equal(prompts, generated)
    assert torch.equal(generated, cpu.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.meta(), scale=SCALE))
    of_prompt = torch.cat([torch.arange(n) < count for n, count in zip(batch.query_lens, counts, strict=True)])
    assert torch.equal(mixed, torch.where(of_prompt[:, None, None], prompts, generated))
    with pytest.raises(RuntimeError, match="row 1 has 1 tokens, and 2 of its prompt"):
        attend(batch, [0, 2, 4, 0, 40])


def test_a_prompt_is_precise_unless_asked_otherwise():
    batch = Batch([(9, 139), (5, 5)], head_dim=64)
    meta = batch.meta()
    meta.prompt_tokens_R = torch.tensor(batch.query_lens, dtype=torch.int32)
    precise = cpu.paged_attention(batch.q, batch.k_cache, batch.v_cache, meta, scale=SCALE)
    assert torch.equal(precise, attend(batch, [0, 0]))


def test_large_and_torn_values_stay_where_they_are():
    """Scores far apart leave one weight; a row of NaN leaves its batch mates alone."""
    batch = Batch([(40, 40), (3, 33), (6, 600)], head_dim=32, group=2)
    batch.q *= 1e4
    got = attend(batch)
    assert got.isfinite().all()
    batch.k_cache[batch.block_tables[1][0], 2] = float("nan")
    batch.v_cache[batch.block_tables[1][0], 1] = float("inf")
    torn = attend(batch)
    first, second = batch.query_lens[0], batch.query_lens[0] + batch.query_lens[1]
    assert not torn[first:second].isfinite().any()
    assert torch.equal(torn[:first], got[:first])
    assert torch.equal(torn[second:], got[second:])
