"""Norm, rotation with KV write, and the fused half layers, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import cpu
from headrace.kernels.attention import AttentionMetadata, write_kv
from headrace.kernels.cpu import PackedLinear, pack
from tests.kernels.cpu.conftest import dequantized, random_blocks
from tests.kernels.test_attention import Batch

OPS = torch.ops.headrace_cpu


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The two halves of the turned part are the pairs; sin carries the sign."""
    size = cos.shape[-1]
    turned = x[..., :size] * cos + x[..., :size].roll(size // 2, dims=-1) * sin
    return torch.cat((turned, x[..., size:]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [576, 37])
def test_rms_norm(isa, size, dtype):
    x, weight = torch.randn(5, 3, size).to(dtype), torch.randn(size)
    want = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    y = cpu.rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rotary", [64, 16, 40])
def test_rope_write_kv(isa, rotary, dtype):
    tokens, heads, kv_heads, size = 7, 6, 2, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size)
    cos, sin = torch.randn(tokens, 1, rotary), torch.randn(tokens, 1, rotary)
    caches = [torch.zeros(4, 8, kv_heads, size, dtype=dtype) for _ in range(4)]
    slots = torch.randperm(32)[:tokens]
    q = cpu.rope_write_kv(qkv, (cos, sin), *caches[:2], slots)
    turned = rotate(qkv[:, : (heads + kv_heads) * size].unflatten(-1, (-1, size)), cos, sin)
    write_kv(turned[:, heads:], qkv[:, (heads + kv_heads) * size :].unflatten(-1, (-1, size)), *caches[2:], slots)
    torch.testing.assert_close(q, turned[:, :heads], rtol=1e-5, atol=1e-5)
    for cache, want in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(cache, want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("size", [64, 24])
def test_a_float16_cache_holds_its_largest_for_what_is_beyond(isa, size):
    huge, most = [1e6, -1e6, float("inf"), float("nan"), 65504.0, 65519.0, 0.5], torch.finfo(torch.float16).max
    qkv, nothing = torch.tensor(huge).repeat(30)[: 3 * size][None], torch.empty(1, 1, 0)
    caches = [torch.zeros(1, 1, 1, size, dtype=torch.float16) for _ in range(4)]
    cpu.rope_write_kv(qkv, (nothing, nothing), *caches[:2], torch.tensor([0]))
    write_kv(qkv[:, size : 2 * size].unflatten(-1, (1, size)), qkv[:, 2 * size :].unflatten(-1, (1, size)), *caches[2:], torch.tensor([0]))
    assert caches[0].nan_to_num(nan=-1.0).abs().max() == most
    assert not caches[0].isinf().any()
    assert caches[0].isnan().any(), "what is not a number is not hidden"
    for ours, want in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=0, equal_nan=True)


def test_bad_slots_are_refused(kernels):
    caches = [torch.zeros(4, 8, 1, 16) for _ in range(2)]
    for slot in (-2, 32):
        with pytest.raises(RuntimeError, match=f"slot {slot} is outside"):
            cpu.rope_write_kv(torch.zeros(1, 48), (torch.ones(1, 1, 16), torch.ones(1, 1, 16)), *caches, torch.tensor([slot]))


def packed_linear(type_number: int, rows: int, columns: int, seed: int = 0) -> PackedLinear:
    return PackedLinear(pack(type_number, random_blocks(type_number, rows, columns, seed), rows, columns))


def test_no_rotation(kernels):
    qkv, nothing = torch.randn(3, 64), torch.empty(3, 1, 0)
    caches = [torch.zeros(1, 4, 1, 16) for _ in range(2)]
    q = cpu.rope_write_kv(qkv, (nothing, nothing), *caches, torch.tensor([2, 0, 1]))
    assert torch.equal(q, qkv[:, :32].unflatten(-1, (2, 16)))
    assert torch.equal(caches[0][0, [2, 0, 1], 0], qkv[:, 32:48])


@pytest.mark.parametrize(("prompt_tokens", "output_format"), [(None, 8), ((0, 3), 8), ((1, 4), 0)])
def test_the_attention_half_equals_its_steps_bit_by_bit(isa, prompt_tokens, output_format):
    hidden, heads, kv_heads, size = 96, 6, 2, 16
    batch = Batch([(1, 30), (4, 9)], kv_heads=kv_heads, group=heads // kv_heads, head_dim=size)
    meta, tokens = batch.meta(), 5
    if prompt_tokens is not None:
        meta.prompt_tokens_R = torch.tensor(prompt_tokens, dtype=torch.int32)
    qkv, output = packed_linear(3, (heads + 2 * kv_heads) * size, hidden), packed_linear(output_format, hidden, heads * size)
    norm, residual = torch.randn(hidden), torch.randn(tokens, hidden)
    cos_sin = torch.randn(tokens, 1, size), torch.randn(tokens, 1, size)
    caches = (batch.k_cache.clone(), batch.v_cache.clone())

    q = cpu.rope_write_kv(qkv(cpu.rms_norm(residual, norm, 1e-5), meta), cos_sin, batch.k_cache, batch.v_cache, meta.slot_mapping_T)
    attended = cpu.paged_attention(q, batch.k_cache, batch.v_cache, meta, scale=0.25, prompts_in_bfloat16=output.in_bfloat16)
    want = residual + output(attended.flatten(1), meta)
    cpu.attention_add_(residual, norm, 1e-5, qkv, output, heads, cos_sin, caches, meta, scale=0.25)
    assert torch.equal(residual, want)
    for cache, other in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
        assert torch.equal(cache.nan_to_num(), other.nan_to_num())


def test_padding_touches_nothing_and_changes_nothing(isa):
    """Tokens past the last row, in slot -1, beside rows without tokens: a step that is filled up to a fixed shape."""
    hidden, heads, kv_heads, size = 96, 6, 2, 16
    batch = Batch([(1, 30), (4, 9)], kv_heads=kv_heads, group=heads // kv_heads, head_dim=size)
    meta, tokens, padded = batch.meta(), 5, 8
    qkv, output = packed_linear(3, (heads + 2 * kv_heads) * size, hidden), packed_linear(8, hidden, heads * size)
    norm, cos_sin = torch.randn(hidden), (torch.randn(padded, 1, size), torch.randn(padded, 1, size))
    residual = torch.randn(padded, hidden)
    residual[tokens:] = float("nan")
    places = {
        "slot_mapping_T": torch.cat((meta.slot_mapping_T, torch.full((padded - tokens,), -1))),
        "query_start_R1": torch.cat((meta.query_start_R1, torch.full((2,), tokens, dtype=torch.int32))),
        "context_len_R": torch.cat((meta.context_len_R, torch.zeros(2, dtype=torch.int32))),
        "block_table_RB": torch.cat((meta.block_table_RB, torch.full((2, meta.block_table_RB.shape[1]), 2**30, dtype=torch.int32))),
    }
    wide = replace(meta, **places)

    def run(rows: int, meta: AttentionMetadata) -> tuple[torch.Tensor, ...]:
        caches = (batch.k_cache.clone(), batch.v_cache.clone())
        fused, turn = residual[:rows].clone(), (cos_sin[0][:rows], cos_sin[1][:rows])
        cpu.attention_add_(fused, norm, 1e-5, qkv, output, heads, turn, caches, meta, scale=0.25)
        q = cpu.rope_write_kv(qkv(cpu.rms_norm(residual[:rows], norm, 1e-5)), turn, batch.k_cache, batch.v_cache, meta.slot_mapping_T)
        attended = cpu.paged_attention(q, batch.k_cache, batch.v_cache, meta, scale=0.25)
        return fused, attended, *(cache.nan_to_num() for cache in (*caches, batch.k_cache, batch.v_cache))

    fused, attended, *caches = run(tokens, meta)
    padded_fused, padded_attended, *padded_caches = run(padded, wide)
    assert torch.equal(padded_fused[:tokens], fused)
    assert padded_fused[tokens:].isnan().all()
    assert torch.equal(padded_attended[:tokens], attended)
    assert not padded_attended[tokens:].any()
    for cache, padded_cache in zip(caches, padded_caches, strict=True):
        assert torch.equal(cache, padded_cache)


@pytest.mark.parametrize("inner", [160, 21])
def test_the_feed_forward_half(isa, inner):
    """With weights in floating point, where nothing is rounded to 8 bits; gates of any size."""
    hidden = 32
    gate_up, down = packed_linear(0, 2 * inner, hidden), packed_linear(0, hidden, inner, seed=1)
    weights = [dequantized(0, random_blocks(0, *shape, seed), *shape).double() for seed, shape in enumerate([(2 * inner, hidden), (hidden, inner)])]
    norm, residual = torch.randn(hidden), torch.randn(9, hidden)
    norm[:4] = torch.tensor([300.0, -300.0, 0.0, 1e-20])
    gate, up = (F.rms_norm(residual.double(), (hidden,), norm.double(), 1e-5) @ weights[0].T).chunk(2, dim=-1)
    want = residual + (F.silu(gate) * up) @ weights[1].T
    cpu.mlp_add_(residual, norm, 1e-5, gate_up, down)
    torch.testing.assert_close(residual.double(), want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))


def test_the_feed_forward_half_leaves_padding_alone(isa):
    gate_up, down, norm = packed_linear(3, 2 * 96, 64), packed_linear(8, 64, 96), torch.randn(64)
    residual = torch.randn(8, 64)
    want, got = residual[:5].clone(), residual.clone()
    cpu.mlp_add_(want, norm, 1e-5, gate_up, down)
    OPS.mlp_add_(got, norm, 1e-5, gate_up.data, 3, down.data, 8, 96, torch.tensor([0, 1, 5, 5], dtype=torch.int32), None)
    assert torch.equal(got[:5], want)
    assert torch.equal(got[5:], residual[5:])
    with pytest.raises(RuntimeError, match="query_start ends at 9, and there are 8 tokens"):
        OPS.mlp_add_(got, norm, 1e-5, gate_up.data, 3, down.data, 8, 96, torch.tensor([0, 9], dtype=torch.int32), None)


def test_layers_in_one_call_equal_their_halves_bit_by_bit(isa):
    hidden, heads, kv_heads, size, inner, layers = 96, 6, 2, 16, 64, 3
    batch = Batch([(1, 30), (4, 9)], kv_heads=kv_heads, group=heads // kv_heads, head_dim=size)
    meta, cos_sin, windows = batch.meta(), (torch.randn(5, 1, size), torch.randn(5, 1, size)), [0, 4, 0]
    shapes = (((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner))
    linears = [[packed_linear(format, *shape, seed) for format, shape in zip((3, 8, 0, 3), shapes, strict=True)] for seed in range(layers)]
    norms = [torch.randn(2, hidden) for _ in range(layers)]
    caches = [[torch.randn_like(batch.k_cache) for _ in range(2)] for _ in range(layers)]
    want, got = torch.randn(5, hidden).repeat(2, 1, 1)
    copies = [[cache.clone() for cache in pair] for pair in caches]
    for (qkv, output, gate_up, down), norm, pair, window in zip(linears, norms, caches, windows, strict=True):
        cpu.attention_add_(want, norm[0], 1e-5, qkv, output, heads, cos_sin, pair, meta, scale=0.25, sliding_window=window, logit_softcap=9.0)
        cpu.mlp_add_(want, norm[1], 1e-5, gate_up, down)
    weights = [
        tensor
        for (qkv, output, gate_up, down), norm in zip(linears, norms, strict=True)
        for tensor in (norm[0], qkv.data, output.data, norm[1], gate_up.data, down.data)
    ]
    formats, flat = [linear.type_number for layer in linears for linear in layer], [cache for pair in copies for cache in pair]
    cpu.layers_add_(got, weights, formats, 1e-5, heads, inner, cos_sin, flat, meta, scale=0.25, windows=windows, logit_softcap=9.0)
    assert torch.equal(got, want)
    assert all(torch.equal(cache, other) for pair, copy in zip(caches, copies, strict=True) for cache, other in zip(pair, copy, strict=True))
    with pytest.raises(RuntimeError, match="3 layers have 6 weights, 4 formats and 2 caches each, not 18, 12 and 5"):
        cpu.layers_add_(got, weights, formats, 1e-5, heads, inner, cos_sin, flat[:5], meta, scale=0.25, windows=windows)


def test_compiled_graphs_have_no_break_and_the_same_result(kernels):
    hidden = 64
    linear, down, norm = packed_linear(3, 2 * hidden, hidden), packed_linear(3, hidden, hidden), torch.randn(hidden)
    batch = Batch([(1, 20), (3, 8)], head_dim=16, kv_heads=1, group=2)
    meta = batch.meta()
    cos = torch.randn(4, 1, 16)

    def step(x: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        h = linear(cpu.rms_norm(x, norm, 1e-5) * 2)[:, :hidden] + 1
        cpu.mlp_add_(h, norm, 1e-5, linear, down)
        q = cpu.rope_write_kv(q, (cos, cos), k_cache, v_cache, meta.slot_mapping_T)
        return h.sum() + cpu.paged_attention(q, k_cache, v_cache, meta, scale=0.3).flatten(1)

    x, qkv = torch.randn(4, hidden), torch.randn(4, 64)
    caches = [batch.k_cache.clone(), batch.v_cache.clone()]
    want = step(x, qkv, *caches)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, qkv, batch.k_cache, batch.v_cache), want)
    assert torch.equal(batch.k_cache.nan_to_num(), caches[0].nan_to_num()), "the write to the cache is part of the graph"


def test_operators_keep_their_promises(kernels):
    """Schemas, aliases and shapes as torch checks them."""
    weight, norm, x = pack(3, random_blocks(3, 32, 64), 32, 64), torch.randn(64), torch.randn(3, 64)
    square = pack(3, random_blocks(3, 64, 64), 64, 64)
    wide = pack(3, random_blocks(3, 128, 64), 128, 64)
    narrow = pack(3, random_blocks(3, 64, 32), 64, 32)
    batch = Batch([(1, 5)], head_dim=16, kv_heads=1, group=2)
    meta = batch.meta()
    caches = [torch.zeros_like(batch.k_cache), torch.zeros_like(batch.k_cache)]
    places = (meta.slot_mapping_T, meta.query_start_R1, meta.context_len_R, meta.block_table_RB)
    turn = torch.ones(1, 1, 16)
    tests = ("test_schema", "test_faketensor")
    for operator, args in {
        OPS.linear: (x, weight.data, 3, 32, None, None, None),
        OPS.attention_add_: (torch.randn(1, 64), norm, 1e-5, square.data, 3, narrow.data, 3, 2, turn, turn, *caches, *places, None, 0.3, 0, 0.0),
        OPS.mlp_add_: (x.clone(), norm, 1e-5, wide.data, 3, square.data, 3, 64, meta.query_start_R1, None),
        OPS.layers_add_: (
            torch.randn(1, 64),
            [norm, square.data, narrow.data, norm, wide.data, square.data],
            [3, 3, 3, 3],
            1e-5,
            2,
            64,
            turn,
            turn,
            caches,
            *places,
            None,
            0.3,
            [0],
            0.0,
        ),
        OPS.embedding: (torch.tensor([1, 2]), weight.data, 3, 32, 64),
        OPS.rms_norm: (x, norm, 1e-5),
        OPS.pack_: (weight.data.clone(), random_blocks(3, 32, 64), 3, 32, 64),
        OPS.paged_attention: (batch.q, *caches, *places[1:], None, 0.3, 0, 0.0),
        OPS.rope_write_kv: (torch.randn(1, 64), turn, turn, *caches, meta.slot_mapping_T),
    }.items():
        torch.library.opcheck(operator, args, test_utils=tests)
