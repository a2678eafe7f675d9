"""Weights in 8 and 4 bits, made while a model is loaded."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from headrace.errors import ModelLoadError
from headrace.kernels import cpu
from headrace.models.gguf_blocks import dequantize
from headrace.models.gguf_formats import FORMATS
from headrace.models.loader import load_model, weight_bytes
from headrace.models.quantize import Q4_1, Q8_0, quantize
from tests.models.paged_driver import PagedDriver
from tests.models.test_packed import SIZES, difference
from tests.models.tiny_models import make, prompt


def restored(weight: torch.Tensor, type_number: int) -> torch.Tensor:
    raw = quantize(weight, type_number)
    assert raw.shape == (len(weight), weight.shape[1] // 32 * FORMATS[type_number].block_bytes)
    return torch.from_numpy(dequantize(raw.numpy().reshape(-1), FORMATS[type_number])).view(weight.shape)


def weights(rows: int = 301, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize(("type_number", "kind"), [(Q8_0, gguf.GGMLQuantizationType.Q8_0), (Q4_1, gguf.GGMLQuantizationType.Q4_1)])
def test_no_worse_than_the_reference_quantiser(type_number, kind):
    weight = weights()
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    error = (restored(weight, type_number) - weight).norm()
    assert error < 1.001 * (theirs - weight).norm()
    if type_number == Q4_1:
        assert error < 0.97 * (theirs - weight).norm(), "the grid is fitted to the values"


@pytest.mark.parametrize("type_number", [Q8_0, Q4_1])
def test_blocks_without_spread(type_number):
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    weight[2, 7] = -2.0
    got = restored(weight, type_number)
    assert torch.equal(got[0], weight[0])
    torch.testing.assert_close(got, weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("type_number", [Q8_0, Q4_1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_what_a_scale_cannot_hold_is_refused(type_number, value):
    weight = weights()
    weight[300, 5] = value
    with pytest.raises(ValueError, match="not finite, or too large"):
        quantize(weight, type_number)


@pytest.fixture
def directory(tmp_path):
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    make("LlamaConfig", SIZES).save_pretrained(tmp_path)
    return tmp_path


def load(path, bits=None):
    return load_model(str(path), dtype=torch.float32, device=torch.device("cpu"), kernels=True, bits=bits)


@pytest.mark.parametrize(("bits", "near"), [(8, 0.04), (4, 0.5)])
def test_a_directory_in_fewer_bits(directory, bits, near):
    model, floats = load(directory, bits), load(directory)
    tokens = prompt(40)
    want, got = PagedDriver(floats).prefill(tokens), PagedDriver(model).prefill(tokens)
    assert 1e-5 < difference(got, want) < near
    assert torch.equal(PagedDriver(model).prefill(tokens, chunks=[1, 30, 9]), got)
    kinds = {name: module.type_number for name, module in model.named_modules() if isinstance(module, (cpu.PackedLinear, cpu.PackedEmbedding))}
    assert kinds["embed_tokens"] == kinds["lm_head"] == Q8_0
    assert {kind for name, kind in kinds.items() if name.startswith("layers.")} == {Q8_0 if bits == 8 else Q4_1}
    layers = [sum(t.numel() for n, t in m.named_buffers() if n.startswith("layers.") and n.endswith(".data")) for m in (model, floats)]
    assert layers[0] * 32 == pytest.approx(layers[1] * (8.5 if bits == 8 else 5))
    assert weight_bytes(model) < weight_bytes(floats) / 3


def test_rows_that_blocks_do_not_fit_are_float16(tmp_path):
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    make("LlamaConfig", SIZES | {"intermediate_size": 72}).save_pretrained(tmp_path)
    model = load(tmp_path, 8)
    assert [layer.mlp.down.type_number for layer in model.layers] == [1, 1]
    assert difference(PagedDriver(model).prefill(prompt(9)), PagedDriver(load(tmp_path)).prefill(prompt(9))) < 0.04


def test_a_tensor_that_does_not_fit_is_named(directory):
    theirs = make("LlamaConfig", SIZES)
    theirs.model.layers[1].mlp.up_proj.weight.data[0, 0] = np.inf
    theirs.save_pretrained(directory)
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' has values.*use --quantization none"):
        load(directory, 4)
