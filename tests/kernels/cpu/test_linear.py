"""Packed linears against float64 products of the dequantised weights, with the activations rounded as the kernels say they do."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import cpu
from headrace.kernels.cpu import PackedEmbedding, PackedLinear, pack
from tests.kernels.cpu.conftest import FLOATS, SCALES, USABLE, dequantized, random_blocks

BLOCKS = {number: name for number, name in cpu.FORMATS.items() if number not in FLOATS}


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x in blocks of 32, of 8 bits a value, and 16 for four neighbours of which one is larger than twice all others; float64."""
    quads = x.float().unflatten(-1, (-1, 8, 4))
    magnitudes = quads.abs().amax(-1)
    largest, wide = magnitudes.max(-1, keepdim=True)
    second = magnitudes.scatter(-1, wide, 0.0).amax(-1, keepdim=True)
    scale = torch.where(largest > 2 * second, torch.maximum(second / 127, largest / 32512), largest / 127)[..., None]
    q = (quads * torch.where(largest[..., None] < 1e-30, 0.0, 1 / scale)).round()
    q += (q + 128) % 256 == 0  # a lower byte of -128 becomes -127
    return (q.double() * scale.double()).flatten(-3)


def assert_close(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, exact: bool = False) -> None:
    want = (x.double() if exact else rounded(x)) @ weight.double().T
    tolerance = 1e-6 * (x.double().abs() @ weight.double().abs().T) + 1e-12
    assert ((y.double() - want).abs() <= tolerance).all(), (y.double() - want).abs().max()


@pytest.mark.parametrize("type_number", cpu.FORMATS, ids=cpu.FORMATS.values())
@pytest.mark.parametrize(("rows", "columns"), [(576, 1536), (40, 256), (1, 768)])
def test_matches_the_dequantised_weight(isa, type_number, rows, columns):
    raw = random_blocks(type_number, rows, columns)
    weight = dequantized(type_number, raw, rows, columns)
    layer = PackedLinear(pack(type_number, raw, rows, columns))
    x = torch.randn(40, columns, generator=torch.Generator().manual_seed(1))
    for m in (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 40) if rows == 40 else (1, 40):
        assert_close(layer(x[:m]), x[:m], weight, exact=type_number in FLOATS)
    full = x.double() @ weight.double().T
    assert (layer(x).double() - full).norm() / full.norm() < (1e-6 if type_number in FLOATS else 8e-3), "what rounding activations to 8 bits costs"


def test_a_few_large_channels_cost_nothing(isa):
    """As models have them: in 8 bits their neighbours would be lost, so they have 16."""
    raw = random_blocks(3, 40, 1536)
    x = torch.randn(9, 1536, generator=torch.Generator().manual_seed(1))
    x[:, [5, 300, 301]] *= 40.0
    full = x.double() @ dequantized(3, raw, 40, 1536).double().T
    y = PackedLinear(pack(3, raw, 40, 1536))(x).double()
    assert ((y - full).norm(dim=1) / full.norm(dim=1) < 8e-3).all()
    assert_close(y, x, dequantized(3, raw, 40, 1536))


@pytest.mark.parametrize("type_number", BLOCKS, ids=BLOCKS.values())
def test_activations_of_16_bits(isa, type_number):
    rows, columns = 40, 768
    raw = random_blocks(type_number, rows, columns)
    layer = PackedLinear(pack(type_number, raw, rows, columns), torch.randn(rows))
    x = torch.randn(30, columns, generator=torch.Generator().manual_seed(1))
    x[::3, [5, 300, 301]] *= 40.0
    full = x.double() @ dequantized(type_number, raw, rows, columns).double().T + layer.bias.double()
    eight = layer(x)
    cpu.activations_of_16_bits(layer)
    sixteen = layer(x)
    assert (sixteen.double() - full).norm() < 0.02 * (eight.double() - full).norm()
    assert torch.equal(layer(x[4:5]), sixteen[4:5])
    assert torch.equal(layer(x[7:19]), sixteen[7:19])


@pytest.mark.parametrize("type_number", BLOCKS, ids=BLOCKS.values())
def test_every_instruction_set_gives_the_same_bits(all_built, type_number):
    """Those that have fused multiply-adds. Any row may come from a machine of another kind: prefixes are shared."""
    rows, columns = 48, 768
    raw = random_blocks(type_number, rows, columns)
    x = torch.randn(23, columns, generator=torch.Generator().manual_seed(1))
    x[::2, [5, 300, 301]] *= 40.0
    results = []
    for isa in USABLE:
        if isa != "generic" and cpu.load(isa) is not None:
            layer = PackedLinear(pack(type_number, raw, rows, columns))
            results.append(torch.cat([layer(x), layer(x[:1]), layer(x[3:6])]))
    if len(results) < 2:
        pytest.skip("this machine has one instruction set with fused multiply-adds")
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_the_tied_embedding_as_output_weight_and_as_table(kernels):
    rows, columns = 1000, 576
    raw = random_blocks(8, rows, columns)
    weight = dequantized(8, raw, rows, columns)
    table = PackedEmbedding(pack(8, raw, rows, columns))
    x = torch.randn(3, columns)
    assert_close(table.linear(x), x, weight)
    ids = torch.tensor([0, rows - 1, 17, 17])
    assert torch.equal(table(ids), weight[ids])


@pytest.mark.parametrize("type_number", cpu.FORMATS, ids=cpu.FORMATS.values())
def test_unpacked_rows_are_the_dequantised_ones_bit_by_bit(isa, type_number):
    rows, columns = 37, 512
    raw = random_blocks(type_number, rows, columns)
    table = PackedEmbedding(pack(type_number, raw, rows, columns))
    assert torch.equal(table(torch.arange(rows)), dequantized(type_number, raw, rows, columns))


@pytest.mark.parametrize("type_number", cpu.FORMATS, ids=cpu.FORMATS.values())
def test_a_row_does_not_depend_on_its_batch_or_the_threads(isa, type_number):
    rows, columns = 192, 1024  # more blocks than are unpacked at once
    weight = pack(type_number, random_blocks(type_number, rows, columns), rows, columns)
    x, layer = torch.randn(260, columns), PackedLinear(weight)
    x[::3, [5, 300, 301]] *= 40.0  # 16 bits in some rows
    y = layer(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for first, last in ((0, 1), (5, 7), (1, 17), (100, 140), (37, 260)):
                assert torch.equal(layer(x[first:last]), y[first:last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_activations(isa, dtype):
    raw = random_blocks(3, 64, 128)
    weight, bias = pack(3, raw, 64, 128), torch.randn(64)
    x = torch.randn(2, 3, 128).to(dtype)
    y = PackedLinear(weight, bias)(x)
    assert y.shape == (2, 3, 64)
    assert y.dtype == dtype
    assert torch.equal(y, (PackedLinear(weight)(x.float()) + bias).to(dtype))


@pytest.mark.parametrize("type_number", BLOCKS, ids=BLOCKS.values())
def test_the_largest_sums_do_not_overflow(isa, type_number):
    """All weight bits set and all activations at the largest magnitude, of either sign."""
    rows, columns = 16, 256
    raw = random_blocks(type_number, rows, columns).view(rows, -1)
    raw[raw != 0] = 0xFF
    blocks = raw.view(-1, cpu.packing.BLOCK_SIZES[type_number][1])
    for offset in SCALES[type_number]:
        blocks[:, offset], blocks[:, offset + 1] = 0, 0x3C  # 1.0
    if type_number == 8:
        blocks[:, 2:] = 0x80  # -128, which no quantiser writes and a file may hold
    raw = raw.reshape(-1)
    for sign in (1.0, -1.0):
        x = torch.full((5, columns), 127.0 * sign)
        x[1] *= torch.linspace(0.99, 1.0, columns)
        x[2, ::32] *= 250.0
        x[3, 7::32] *= -torch.linspace(2.1, 250.0, columns // 32)  # lower bytes of all sizes
        assert_close(PackedLinear(pack(type_number, raw, rows, columns))(x), x, dequantized(type_number, raw, rows, columns))


def test_what_is_not_finite_stays_in_its_row(isa):
    layer = PackedLinear(pack(3, random_blocks(3, 32, 64), 32, 64))
    x = torch.randn(6, 64)
    clean = layer(x)
    x[1, 3], x[4, 40] = float("nan"), float("inf")
    y = layer(x)
    assert not y[[1, 4]].isfinite().any()
    assert torch.equal(y[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_zeros_and_tiny_activations(isa):
    layer = PackedLinear(pack(3, random_blocks(3, 32, 64), 32, 64))
    assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 32))
    assert layer(torch.full((3, 64), 1e-42)).abs().max() < 1e-30
    assert layer(torch.zeros(0, 64)).shape == (0, 32)


def test_an_arena_holds_several_weights(kernels):
    sizes = [cpu.packed_bytes(3, 40, 64), cpu.packed_bytes(8, 16, 32), cpu.packed_bytes(3, 40, 64)]
    arena = cpu.Arena(sum(sizes) + 2 * 64)
    raws = [random_blocks(3, 40, 64, seed=1), random_blocks(8, 16, 32), random_blocks(3, 40, 64, seed=2)]
    packed = [pack(3, raws[0], 40, 64, arena=arena), pack(8, raws[1], 16, 32, arena=arena), pack(3, raws[2], 40, 64, arena=arena)]
    for weight, raw in zip(packed, raws, strict=True):
        assert weight.data.data_ptr() % 64 == 0
        assert torch.equal(weight.data, pack(weight.type_number, raw, weight.rows, weight.columns).data)
    with pytest.raises(ValueError, match="no 10000000 left"):
        arena.take(10_000_000)


def test_wrong_sizes_are_refused(kernels):
    raw = random_blocks(3, 32, 64)
    weight = pack(3, raw, 32, 64)
    with pytest.raises(ValueError, match="Q4_0, Q4_1"):
        pack(10, raw, 32, 64)
    with pytest.raises(RuntimeError, match="1280 bytes, not 1260"):
        pack(3, raw[:-20], 32, 64)
    with pytest.raises(ValueError, match="no whole number of Q4_1 blocks of 32"):
        pack(3, raw, 32, 65)
    with pytest.raises(RuntimeError, match=r"does not hold a weight \[32, 96\]"):
        PackedLinear(weight)(torch.zeros(1, 96))
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        PackedLinear(weight)(torch.zeros(1, 64, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="bias must be float32 with 32 values"):
        PackedLinear(weight, torch.zeros(31))(torch.zeros(1, 64))
    with pytest.raises(RuntimeError, match="id 32 is outside"):
        PackedEmbedding(weight)(torch.tensor([32]))
