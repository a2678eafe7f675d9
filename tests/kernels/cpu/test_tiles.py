"""Products of prompts in bfloat16 by AMX tiles: their numbers, and that a token's don't depend on what is computed beside it."""

from __future__ import annotations

import itertools

import pytest
import torch

from headrace.kernels import cpu
from headrace.kernels.attention import AttentionMetadata
from headrace.kernels.cpu import PackedLinear, pack
from tests.kernels.cpu.conftest import FLOATS, dequantized, random_blocks

TILED = {number: name for number, name in cpu.FORMATS.items() if name != "F32"}


@pytest.fixture(autouse=True)
def amx():
    if cpu.load("amx") is None:
        pytest.skip(f"no tiles: {cpu.reason()}")
    yield
    cpu.load()


def step(*rows: tuple[int, int]) -> AttentionMetadata:
    """Rows of (tokens, how many of them are of the prompt); only what products read of it."""
    lens = [tokens for tokens, _ in rows]
    return AttentionMetadata(
        query_start_R1=torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
        prompt_tokens_R=torch.tensor([prompt for _, prompt in rows], dtype=torch.int32),
        context_len_R=torch.tensor(lens, dtype=torch.int32),
        block_table_RB=torch.zeros(len(rows), 1, dtype=torch.int32),
        slot_mapping_T=torch.arange(sum(lens)),
        positions_T=torch.arange(sum(lens)),
        query_lens=lens,
        context_lens=lens,
        num_decode_rows=0,
    )


def values(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


@pytest.mark.parametrize("type_number", TILED, ids=TILED.values())
def test_matches_the_dequantised_weight_rounded_to_bfloat16(type_number):
    for rows, columns in ((576, 1536), (40, 256), (1, 768), (40, 90)):
        if type_number not in FLOATS and columns % 256:
            continue
        raw = random_blocks(type_number, rows, columns)
        weight, x = in_bfloat16(dequantized(type_number, raw, rows, columns)), values(70, columns)
        layer = PackedLinear(pack(type_number, raw, rows, columns), values(rows))
        for m in (1, 2, 15, 16, 17, 31, 32, 33, 40, 70) if rows == 40 else (1, 70):
            got = layer(x[:m], step((m, m))).double()
            want = in_bfloat16(x[:m]) @ weight.T + layer.bias.double()
            tolerance = 2e-6 * (x[:m].double().abs() @ weight.abs().T) + 1e-6 * want.abs()
            assert ((got - want).abs() <= tolerance).all(), (got - want).abs().max()


@pytest.mark.parametrize("type_number", [3, 8, 14, 1], ids=("Q4_1", "Q8_0", "Q6_K", "F16"))
def test_a_token_of_a_prompt_is_the_same_in_any_company(type_number):
    rows, columns = 80, 768
    layer = PackedLinear(pack(type_number, random_blocks(type_number, rows, columns), rows, columns))
    x = values(40, columns)
    whole = layer(x, step((40, 40)))
    for m in range(1, 40):
        assert torch.equal(layer(x[:m], step((m, m))), whole[:m])
        assert torch.equal(layer(x[m : m + 1], step((1, 1))), whole[m : m + 1])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x, step((40, 40))), whole)
    finally:
        torch.set_num_threads(before)
    x[3] = float("nan")
    assert torch.equal(layer(x, step((40, 40)))[4:], whole[4:])


def test_each_kind_of_token_has_its_product_in_a_mixed_step():
    """Generated tokens before, between and after those of prompts: what a token is decides, not where it stands."""
    layer = PackedLinear(pack(3, random_blocks(3, 80, 96), 80, 96), values(80))
    x = values(22, 96)
    prompts, others = layer(x, step((22, 22))), layer(x)
    assert not torch.equal(prompts, others)
    mixed = layer(x, step((1, 0), (1, 1), (1, 0), (5, 5), (4, 2), (3, 0), (7, 7)))
    of_prompt = torch.tensor([0, 1, 0, *[1] * 5, 1, 1, 0, 0, 0, 0, 0, *[1] * 7], dtype=torch.bool)
    assert torch.equal(mixed, torch.where(of_prompt[:, None], prompts, others))
    assert torch.equal(layer(x, step((22, 0))), others)
    padded = layer(x, step((1, 0), (5, 5)))
    assert torch.equal(padded[1:6], prompts[1:6])
    assert (padded[6:] == 0).all(), "padding"
    with pytest.raises(RuntimeError, match="row 1 has 3 tokens, and 4 of its prompt"):
        layer(x, step((2, 0), (3, 4)))


@pytest.mark.parametrize("formats", [(3, 3), (3, 0), (0, 8), (1, 14)], ids=("Q4_1", "Q4_1 F32", "F32 Q8_0", "F16 Q6_K"))
@pytest.mark.parametrize("inner", [256, 48])
def test_the_feed_forward_half(formats, inner):
    """Whatever of it goes by tiles: gate and up in one pass, or step by step where a weight or a size does not fit."""
    if any(number not in FLOATS and inner % (256 if number == 14 else 32) for number in formats):
        formats = (formats[0], 30)
    hidden, tokens = 96 if formats[0] != 14 else 256, 21
    gate_up = PackedLinear(pack(formats[0], random_blocks(formats[0], 2 * inner, hidden), 2 * inner, hidden))
    down = PackedLinear(pack(formats[1], random_blocks(formats[1], hidden, inner), hidden, inner))
    residual, norm = values(tokens, hidden), values(hidden, seed=2)
    meta = step((1, 0), (1, 1), (9, 9), (8, 3), (2, 0))
    gate, up = gate_up(cpu.rms_norm(residual, norm, 1e-5), meta).chunk(2, dim=-1)
    want = residual + down(torch.nn.functional.silu(gate) * up, meta)
    got = residual.clone()
    cpu.mlp_add_(got, norm, 1e-5, gate_up, down, meta)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().mean()))
    for first, last, prompt in ((0, 1, 0), (1, 2, 1), (2, 8, 1), (8, 11, 1), (11, 14, 1), (14, 21, 0)):
        alone = residual[first:last].clone()
        cpu.mlp_add_(alone, norm, 1e-5, gate_up, down, step((last - first, (last - first) * prompt)))
        assert torch.equal(alone, got[first:last])


def test_precise_activations_and_float32_weights_have_no_bfloat16():
    x = values(9, 96)
    for type_number in (0, 1, 3, 30):
        layer = PackedLinear(pack(type_number, random_blocks(type_number, 48, 96), 48, 96))
        if type_number != 0:
            assert not torch.equal(layer(x, step((9, 9))), layer(x))
            cpu.activations_of_16_bits(layer)
        assert torch.equal(layer(x, step((9, 9))), layer(x))
