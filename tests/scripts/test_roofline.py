from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headrace.kernels import cpu
from headrace.kernels.cpu.build import KernelBuildError
from tests.models.gguf_writer import write_gguf
from tests.models.tiny_models import make
from tests.scripts.load_script import load_script

roofline = load_script("roofline")


def packed(type_number: int, rows: int, columns: int) -> cpu.PackedLinear:
    data = torch.zeros(cpu.packed_bytes(type_number, rows, columns), dtype=torch.uint8)
    return cpu.PackedLinear(cpu.PackedWeight(data=data, type_number=type_number, rows=rows, columns=columns))


class Model(nn.Module):
    """A layer with one matrix in blocks and one in float16, and a head in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_heads=4, head_dim=8, num_layers=3)
        self.layers = nn.ModuleList([nn.ModuleList([packed(3, 64, 32), packed(1, 16, 32)])])
        self.embed_tokens, self.lm_head = nn.Embedding(1, 1), packed(8, 128, 32)


def test_what_a_step_needs() -> None:
    model = Model()
    need = roofline.need(model, [(1, 9), (3, 0)], kv_bytes=100)
    assert need.packed == 4 * 64 * 32 + 2 * 128 * 32, "four tokens go through the layer, two rows are sampled"
    assert need.floats == 4 * 16 * 32 + (10 + 1 + 2 + 3) * 2 * 4 * 8 * 3, "the tokens see 10, 1, 2 and 3 positions"
    assert need.tiles == 0
    tiled = roofline.need(model, [(3, 0)], kv_bytes=100, by_tiles=True)
    assert tiled.tiles == 3 * (64 * 32 + 16 * 32) + (1 + 2 + 3) * 2 * 4 * 8 * 3, "all but the head"
    assert (tiled.packed, tiled.floats) == (128 * 32, 0)
    assert need.num_bytes == 64 * 32 * 5 // 8 + 16 * 32 * 2 + 128 * 32 * 17 // 16 + 4 + 100 * (10 + 3)


def test_flags_of_the_server(tmp_path: Path) -> None:
    write_gguf(make("LlamaConfig", {}), tmp_path / "model.gguf", "llama")
    config = roofline.config_of(["--quantization", "none", "--model", str(tmp_path / "model.gguf"), *roofline.FIXED_FLAGS])
    assert (config.quantization, config.max_model_len, config.enable_prefix_caching) == ("none", 4096, False)


def test_the_limit_is_the_larger_of_two_times() -> None:
    ceilings = roofline.Ceilings(read=1e9, packed=1e10, floats=1e9)
    assert roofline.Need(num_bytes=10**9, packed=10**9, floats=10**8).limit(ceilings) == pytest.approx(1.0)
    assert roofline.Need(num_bytes=10**8, packed=10**10, floats=10**9).limit(ceilings) == pytest.approx(2.0)
    rows = [("decode, 1 row", roofline.Need(num_bytes=10**8, packed=10**8, floats=10**7), 0.2)]
    assert roofline.table(ceilings, rows).splitlines()[2] == "| decode, 1 row | 100 | 0.10 | 0.01 | 0.00 | 100.00 | 200.00 | 50% |"
    with_tiles = roofline.Ceilings(read=1e9, packed=1e10, floats=1e9, tiles=1e11)
    assert roofline.Need(num_bytes=10**8, packed=10**9, floats=10**8, tiles=10**11).limit(with_tiles) == pytest.approx(1.2)


def test_ceilings_are_measured_with_the_kernels_instructions() -> None:
    kernels = cpu.load()
    if kernels is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    try:
        ceilings = roofline.measure_ceilings(kernels.isa, threads=2, rounds=1)
    except KernelBuildError as error:
        pytest.skip(str(error))
    assert ceilings.read > 1e6
    assert ceilings.packed > 1e6
    assert ceilings.floats > 1e6
    assert (ceilings.tiles > 1e6) == (kernels.isa == "amx")
