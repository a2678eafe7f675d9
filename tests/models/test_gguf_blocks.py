"""Every block format dequantises to the same bits as the `gguf` package gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from headrace.models import gguf_blocks
from headrace.models.gguf_blocks import dequantize
from headrace.models.gguf_formats import FORMATS, OTHER_FORMATS

# where the float16 scales of a block stand: random bytes there would be infinities and NaN
SCALE_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    (block_format,) = (f for f in FORMATS.values() if f.name == name)
    blocks = generator.integers(0, 256, size=(count, block_format.block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[name]:
        scales = (generator.standard_normal(count) * 10.0 ** generator.integers(-7, 4, count)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def ours(name: str, raw: np.ndarray) -> np.ndarray:
    return dequantize(raw, next(f for f in FORMATS.values() if f.name == name))


@pytest.mark.parametrize("name", SCALE_OFFSETS)
def test_random_blocks_equal_the_reference_to_the_bit(name, monkeypatch):
    monkeypatch.setattr(gguf_blocks, "_VALUES_AT_ONCE", 1 << 11)  # several turns, the last one partly filled
    raw = random_blocks(name, 301)
    want = gguf.dequantize(raw.reshape(301, -1), gguf.GGMLQuantizationType[name]).reshape(-1)
    got = ours(name, raw)
    assert got.dtype == np.float32
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values_come_back_near(name):
    """Guards against a reference and a reader that share a mistake in the order of values."""
    values = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    got = ours(name, gguf.quantize(values, gguf.GGMLQuantizationType[name]).reshape(-1)).reshape(4, 64)
    assert np.abs(got - values).max() < {"Q4_0": 0.4, "Q4_1": 0.3, "Q5_0": 0.2, "Q5_1": 0.15, "Q8_0": 0.03}[name]


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16), ("F64", np.float64)])
def test_plain_floats(name, dtype):
    values = np.random.default_rng(2).standard_normal(70).astype(dtype)
    assert np.array_equal(ours(name, values.view(np.uint8)), values.astype(np.float32))


def test_bfloat16():
    raw = np.random.default_rng(3).integers(0, 0x7F00, size=64, dtype=np.uint16)
    want = gguf.dequantize(raw.view(np.uint8), gguf.GGMLQuantizationType.BF16)
    assert np.array_equal(ours("BF16", raw.view(np.uint8)), want)


def test_the_result_is_a_copy():
    values = np.ones(8, dtype=np.float32)
    got = ours("F32", values.view(np.uint8))
    values[:] = 2
    assert (got == 1).all()
    assert got.flags.writeable


def test_formats_have_the_numbers_and_sizes_of_the_reference():
    for number, block_format in FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == block_format.name
        assert gguf.GGML_QUANT_SIZES[kind] == (block_format.block_size, block_format.block_bytes)
    for number, name in OTHER_FORMATS.items():
        assert gguf.GGMLQuantizationType(number).name == name
