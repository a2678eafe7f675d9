"""Keys and values in another type than the model's, by our kernels and by torch's operators."""

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
from headrace.models.loader import load_model
from headrace.runner.device import resolve_kv_dtype
from headrace.runner.execution_path import ExecutionPath
from headrace.runner.model_runner import ModelRunner
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import prompt
from tests.runner.tiny_model import Hand, save_tiny_llama
from tests.runner.tiny_packed import kernels_or_skip, write_tiny

NEW = 8
PROMPTS = [prompt(length, seed=length) for length in (3, 17, 30)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return EngineConfig(
        model=str(path), quantization="none", device="cpu", threads=1, block_size=4, num_gpu_blocks_override=128, max_model_len=64, swap_space=1 << 20
    )


@pytest.fixture(params=["kernels", "torch"])
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "torch":
        monkeypatch.setenv(ISA_VARIABLE, "off")
        assert cpu.load() is None
    else:
        kernels_or_skip()
    yield request.param == "kernels"
    monkeypatch.undo()
    cpu.load()


@pytest.mark.parametrize(
    ("dtype", "kv"), [("float32", "float16"), ("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")]
)
def test_answers_are_those_of_the_model_over_such_a_storage(config: EngineConfig, by_kernels: bool, dtype: Any, kv: Any) -> None:
    """Batched and in chunks, with a swap, a copied block and a prefix of another request's blocks on the way."""
    runner = ModelRunner(replace(config, dtype=dtype, kv_cache_dtype=kv))
    info = runner.info(0.0)
    assert (info.dtype, info.kv_cache_dtype) == (dtype, kv)
    assert {cache.dtype for layer in runner.caches for cache in layer} == {getattr(torch, kv)}
    assert info.kv_bytes == sum(cache.nbytes for layer in runner.caches for cache in layer)
    own = load_model(config.model, dtype=getattr(torch, dtype), device=torch.device("cpu"), kernels=by_kernels)
    expected = [PagedDriver(own, kv_dtype=getattr(torch, kv)).greedy(tokens, NEW) for tokens in PROMPTS]

    hand = Hand(runner)
    tracks = [hand.add(str(index), tokens) for index, tokens in enumerate(PROMPTS)]
    hand.finish(["0", "1", "2"], 4, chunk=7)
    away = tracks[1]
    out = tuple(zip(away.blocks, range(len(away.blocks)), strict=True))
    hand.step({"0": 1}, swap_out=out)
    hand.step({"2": 1}, copies=tuple((tracks[0].blocks[0], block) for block in away.blocks))  # what was there is overwritten
    away.blocks, away.started = [hand.free.pop(0) for _ in away.blocks], False
    hand.step({"1": 1}, swap_in=tuple((host, block) for (_, host), block in zip(out, away.blocks, strict=True)))
    hand.finish(["0", "1", "2"], NEW)
    fork = hand.add("fork", PROMPTS[2])
    own_block = hand.free.pop(0)
    fork.blocks, fork.computed = [*tracks[2].blocks[:7], own_block], 29  # 7 whole blocks and a copied one
    hand.step({"fork": 1}, copies=((tracks[2].blocks[7], own_block),))
    hand.finish(["fork"], NEW)
    assert [track.answer for track in tracks] == expected
    assert fork.answer == expected[2]
    runner.close()


def test_auto() -> None:
    path = ExecutionPath(name="")
    assert resolve_kv_dtype("auto", torch.float32, path) is torch.float32
    assert resolve_kv_dtype("auto", torch.bfloat16, replace(path, kernels=True)) is torch.bfloat16
    assert resolve_kv_dtype("auto", torch.float32, replace(path, packed=True)) is torch.float16
    assert resolve_kv_dtype("auto", torch.float32, replace(path, kernels=True, bits=8)) is torch.float16
    assert resolve_kv_dtype("float32", torch.float32, replace(path, packed=True)) is torch.float32


def test_an_unknown_type_is_named(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 is not known; use auto, float32, float16 or bfloat16"):
        replace(config, kv_cache_dtype="fp8")  # type: ignore[arg-type]


def test_the_same_memory_holds_twice_the_tokens(tmp_path: Path) -> None:
    kernels_or_skip()
    config = EngineConfig(model=str(write_tiny(tmp_path / "model.gguf")), device="cpu", threads=1, block_size=4, kv_memory=1 << 20)
    runners = [ModelRunner(replace(config, kv_cache_dtype=kind)) for kind in ("float32", "auto")]
    assert [runner.info(0.0).kv_cache_dtype for runner in runners] == ["float32", "float16"]
    assert runners[1].num_blocks == 2 * runners[0].num_blocks
    for runner in runners:
        runner.close()


def test_keys_beyond_float16_spoil_nothing(tmp_path: Path, by_kernels: bool) -> None:
    """Keys of one token are some 10 million: the request that has it still gets an answer, and others get theirs."""
    model = save_tiny_llama(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[7, 0] = 1.0
        model.model.layers[0].self_attn.k_proj.weight[:, 0] = 1e7
    model.save_pretrained(tmp_path)
    runner = ModelRunner(
        EngineConfig(
            model=str(tmp_path),
            quantization="none",
            device="cpu",
            threads=1,
            block_size=4,
            kv_memory=1 << 20,
            kv_cache_dtype="float16",
            max_model_len=64,
        )
    )
    others = [[token for token in tokens if token != 7] for tokens in PROMPTS]
    own = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"), kernels=by_kernels)
    expected = [PagedDriver(own, kv_dtype=torch.float16).greedy(tokens, NEW) for tokens in others]
    assert not any(7 in answer for answer in expected), "the others never meet the token"
    hand = Hand(runner)
    hand.add("huge", [5, 7, 9, 7])
    for index, tokens in enumerate(others):
        hand.add(str(index), tokens)
    hand.finish(list(hand.tracks), NEW)  # an error of any row ends the test
    assert [hand.tracks[str(index)].answer for index in range(len(others))] == expected
    huge = hand.tracks["huge"].blocks[0]
    keys = runner.caches[0][0][huge].float()
    assert keys.isfinite().all()
    assert keys.abs().max() == torch.finfo(torch.float16).max
    runner.close()
