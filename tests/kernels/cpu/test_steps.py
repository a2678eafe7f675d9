"""Norm, activation, rotation with KV write, and the fused half layers, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import cpu
from headrace.kernels.attention import write_kv
from headrace.kernels.cpu import pack
from tests.kernels.cpu.conftest import random_blocks
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


@pytest.mark.parametrize("size", [1536, 21])
def test_silu_mul(isa, size):
    x = torch.randn(9, 2 * size) * 20
    x[0, :4] = torch.tensor([-1000.0, 1000.0, 0.0, -90.0])
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(cpu.silu_mul(x).double(), F.silu(gate) * up, rtol=1e-5, atol=1e-6)


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


def test_bad_slots_are_refused(kernels):
    caches = [torch.zeros(4, 8, 1, 16) for _ in range(2)]
    for slot in (-1, 32):
        with pytest.raises(RuntimeError, match=f"slot {slot} is outside"):
            cpu.rope_write_kv(torch.zeros(1, 48), (torch.ones(1, 1, 16), torch.ones(1, 1, 16)), *caches, torch.tensor([slot]))


def test_half_layers_equal_their_steps_bit_by_bit(isa):
    hidden, inner, heads, kv_heads, size = 96, 160, 6, 2, 16
    batch = Batch([(1, 30), (4, 9)], kv_heads=kv_heads, group=heads // kv_heads, head_dim=size)
    meta, tokens = batch.meta(), 5
    qkv = pack(3, random_blocks(3, (heads + 2 * kv_heads) * size, hidden), (heads + 2 * kv_heads) * size, hidden)
    output = pack(8, random_blocks(8, hidden, heads * size), hidden, heads * size)
    gate_up, down = pack(3, random_blocks(3, 2 * inner, hidden), 2 * inner, hidden), pack(2, random_blocks(2, hidden, inner), hidden, inner)
    norm, residual = torch.randn(hidden), torch.randn(tokens, hidden)
    cos, sin = torch.randn(tokens, 1, size), torch.randn(tokens, 1, size)
    caches = [batch.k_cache.clone(), batch.v_cache.clone()]

    h = cpu.rms_norm(residual, norm, 1e-5)
    q = cpu.rope_write_kv(cpu.linear(h, qkv), (cos, sin), batch.k_cache, batch.v_cache, meta.slot_mapping_T)
    attended = cpu.paged_attention(q, batch.k_cache, batch.v_cache, meta, scale=0.25)
    want = residual + cpu.linear(attended.flatten(1), output)
    got = residual.clone()
    OPS.attention_add_(
        got, norm, 1e-5, qkv.data, 3, output.data, 8, heads, cos, sin, *caches, meta.slot_mapping_T, meta.query_start_R1, meta.context_len_R,
        meta.block_table_RB, 0.25, 0, 0.0,
    )  # fmt: skip
    assert torch.equal(got, want)
    for cache, other in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
        assert torch.equal(cache.nan_to_num(), other.nan_to_num())

    want = got + cpu.linear(cpu.silu_mul(cpu.linear(cpu.rms_norm(got, norm, 1e-5), gate_up)), down)
    OPS.mlp_add_(got, norm, 1e-5, gate_up.data, 3, down.data, 2, inner)
    assert torch.equal(got, want)
    want = got + cpu.linear(attended.flatten(1), output)
    OPS.linear_add_(got, attended.flatten(1), output.data, 8, None)
    assert torch.equal(got, want)
    assert torch.equal(OPS.norm_linear(got, norm, 1e-5, qkv.data, 3, qkv.rows, None), cpu.linear(cpu.rms_norm(got, norm, 1e-5), qkv))


def test_compiled_graphs_have_no_break_and_the_same_result(kernels):
    hidden = 64
    weight, norm = pack(3, random_blocks(3, 2 * hidden, hidden), 2 * hidden, hidden), torch.randn(hidden)
    batch = Batch([(1, 20), (3, 8)], head_dim=16, kv_heads=1, group=2)
    meta = batch.meta()
    cos = torch.randn(4, 1, 16)

    def step(x: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        h = cpu.silu_mul(cpu.linear(cpu.rms_norm(x, norm, 1e-5) * 2, weight)) + 1
        OPS.mlp_add_(h, norm, 1e-5, weight.data, 3, down.data, 3, hidden)
        q = cpu.rope_write_kv(q, (cos, cos), k_cache, v_cache, meta.slot_mapping_T)
        return h.sum() + cpu.paged_attention(q, k_cache, v_cache, meta, scale=0.3).flatten(1)

    down = pack(3, random_blocks(3, hidden, hidden), hidden, hidden)
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
    batch = Batch([(1, 5)], head_dim=16, kv_heads=1, group=2)
    meta = batch.meta()
    caches = [torch.zeros_like(batch.k_cache), torch.zeros_like(batch.k_cache)]
    tests = ("test_schema", "test_faketensor")
    for operator, args in {
        OPS.linear: (x, weight.data, 3, 32, None),
        OPS.norm_linear: (x, norm, 1e-5, weight.data, 3, 32, None),
        OPS.linear_add_: (x.clone(), x, square.data, 3, None),
        OPS.mlp_add_: (x.clone(), norm, 1e-5, wide.data, 3, square.data, 3, 64),
        OPS.embedding: (torch.tensor([1, 2]), weight.data, 3, 32, 64, 1),
        OPS.rms_norm: (x, norm, 1e-5),
        OPS.silu_mul: (x,),
        OPS.pack_: (weight.data.clone(), random_blocks(3, 32, 64), 3, 32, 64),
        OPS.paged_attention: (batch.q, *caches, meta.query_start_R1, meta.context_len_R, meta.block_table_RB, 0.3, 0, 0.0),
        OPS.rope_write_kv: (torch.randn(1, 64), torch.ones(1, 1, 16), torch.ones(1, 1, 16), *caches, meta.slot_mapping_T),
    }.items():
        torch.library.opcheck(operator, args, test_utils=tests)
