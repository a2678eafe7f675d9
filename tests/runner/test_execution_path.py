"""Which way computes: what serves, what is said where it can't, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.kernels.cpu.library import ISA_VARIABLE
from headrace.models.loader import load_model, weight_bytes
from headrace.runner.execution_path import choose_path
from headrace.runner.model_runner import ModelRunner
from tests.models.gguf_writer import write_gguf
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import TINY, make, prompt
from tests.runner.tiny_model import Hand


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    write_gguf(make("LlamaConfig", sizes), path, "llama", quantization="Q8_0")
    return EngineConfig(model=str(path), quantization="gguf", device="cpu", threads=1, block_size=4, kv_memory=1 << 20)


def served_ids(runner: ModelRunner) -> list[int]:
    hand = Hand(runner)
    track = hand.add("a", prompt(20))
    hand.finish(["a"], 8)
    return track.answer


def expected_ids(config: EngineConfig, *, packed: bool) -> list[int]:
    model = load_model(config.model, dtype=torch.float32, device=torch.device("cpu"), packed=packed)
    return PagedDriver(model).greedy(prompt(20), 8)


def test_packed_weights_serve(config: EngineConfig) -> None:
    kernels = cpu.load()
    if kernels is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    runner = ModelRunner(config)
    info = runner.info(0.0)
    assert info.path == f"eager, packed GGUF weights ({kernels.isa})"
    assert info.dtype == "float32"
    assert info.weight_bytes < ModelRunner(replace(config, quantization="none")).info(0.0).weight_bytes / 3
    runner.close()
    config = replace(config, kv_cache_dtype="float32")  # float16 moves activations, and some of them are rounded to the next number
    for each in (config, replace(config, deterministic=True)):
        runner = ModelRunner(each)
        assert served_ids(runner) == expected_ids(config, packed=True)
        runner.close()
    wide = ModelRunner(replace(config, activation_bits=16))
    assert wide.info(0.0).path == f"eager, packed GGUF weights ({kernels.isa}), 16-bit activations"
    assert served_ids(wide) == expected_ids(config, packed=False)
    wide.close()


def test_without_kernels_the_weights_are_dequantised_and_it_is_said(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "off")
    runner = ModelRunner(config)
    monkeypatch.undo()
    cpu.load()
    assert runner.info(0.0).path == "eager, dequantised GGUF weights (no CPU kernels)"
    assert f"There are no CPU kernels: {ISA_VARIABLE} is off. The GGUF weights are dequantised" in caplog.text
    assert served_ids(runner) == expected_ids(config, packed=False)


def test_what_cannot_go_with_it(config: EngineConfig, tmp_path: Path) -> None:
    make(*TINY["llama"]).save_pretrained(tmp_path)
    for changes, device, dtype, named in (
        ({"model": str(tmp_path)}, "cpu", torch.float32, "Hugging Face directory; use int8 or int4"),
        ({}, "cuda", torch.float32, "--quantization none or --device cpu"),
        ({"dtype": "bfloat16"}, "cpu", torch.bfloat16, "not in bfloat16; leave --dtype at auto"),
        ({"quantization": "none", "activation_bits": 16}, "cpu", torch.float32, "--activation-bits is about"),
    ):
        with pytest.raises(ConfigError, match=named):
            choose_path(replace(config, **changes), torch.device(device), dtype)
    with pytest.raises(ConfigError, match="use none, gguf, int8 or int4"):
        replace(config, quantization="awq")
    with pytest.raises(ConfigError, match="must be 8 or 16, not 4"):
        replace(config, activation_bits=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "device", "packed"),
    [
        ({}, "cpu", True),
        ({"quantization": "gguf", "dtype": "float32"}, "cpu", True),
        ({"quantization": "none"}, "cpu", False),
        ({"dtype": "float32"}, "cpu", False),
        ({"dtype": "bfloat16"}, "cpu", False),
        ({}, "cuda", False),
    ],
)
def test_what_serves_a_gguf_file(config: EngineConfig, changes: dict[str, str], device: str, packed: bool) -> None:
    """By default its own blocks on CPU; a dtype asks for weights in that dtype."""
    if packed and cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    config = replace(config, quantization=None)
    dtype = torch.bfloat16 if changes.get("dtype") == "bfloat16" else torch.float32
    assert choose_path(replace(config, **changes), torch.device(device), dtype).packed is packed


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_any_model_in_fewer_bits(config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    kernels = cpu.load()
    if kernels is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    make(*TINY["llama"]).save_pretrained(tmp_path)
    for model in (str(tmp_path), config.model):
        runner = ModelRunner(replace(config, model=model, quantization=kind, kv_cache_dtype="float32"))
        assert runner.info(0.0).path == f"eager, {kind} weights ({kernels.isa})"
        own = load_model(model, dtype=torch.float32, device=torch.device("cpu"), kernels=True, bits=8 if kind == "int8" else 4)
        assert served_ids(runner) == PagedDriver(own).greedy(prompt(20), 8)
        runner.close()
    monkeypatch.setenv(ISA_VARIABLE, "off")
    with pytest.raises(ConfigError, match=f"--quantization {kind} needs the CPU kernels: {ISA_VARIABLE} is off"):
        choose_path(replace(config, quantization=kind), torch.device("cpu"), torch.float32)
    monkeypatch.undo()
    cpu.load()


def test_a_directory_is_served_as_it_is(config: EngineConfig, tmp_path: Path) -> None:
    make(*TINY["llama"]).save_pretrained(tmp_path)
    assert not choose_path(replace(config, model=str(tmp_path), quantization=None), torch.device("cpu"), torch.float32).packed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("isa", ["", "off"])
def test_weights_in_floating_point(config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, isa: str) -> None:
    """Of a directory and of a dequantised file, by the kernels and without them."""
    make(*TINY["llama"]).save_pretrained(tmp_path)
    monkeypatch.setenv(ISA_VARIABLE, isa)
    kernels = cpu.load()
    if not isa and kernels is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    for model in (str(tmp_path), config.model):
        floats = replace(config, model=model, quantization="none", dtype=dtype)
        path = choose_path(floats, torch.device("cpu"), torch.float32)
        assert path.name == ("eager, torch operators (no CPU kernels)" if kernels is None else f"eager, CPU kernels ({kernels.isa})")
        runner = ModelRunner(floats)
        info, answer = runner.info(0.0), served_ids(runner)
        assert (info.path, info.dtype) == (path.name, dtype)
        own = load_model(model, dtype=getattr(torch, dtype), device=torch.device("cpu"), kernels=kernels is not None)
        assert answer == PagedDriver(own, kv_dtype=getattr(torch, dtype)).greedy(prompt(20), 8)
        assert info.weight_bytes == weight_bytes(own)
        runner.close()
    assert choose_path(floats, torch.device("cuda"), torch.float32).name == "eager"
    monkeypatch.undo()
    cpu.load()
