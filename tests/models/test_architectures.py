"""Every architecture against transformers' own model with the same random weights."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import ModelLoadError
from headrace.kernels import cpu
from headrace.runner.deterministic import make_deterministic
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import TINY, make, prompt, save_and_load, their_greedy, their_logits

TOKENS = prompt(37)


@pytest.fixture(params=["torch", "kernels"])
def kernels(request):
    """Whether the CPU kernels compute."""
    if request.param == "kernels" and cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    return request.param == "kernels"


@pytest.mark.parametrize("name", TINY)
def test_equals_transformers(name, kernels, tmp_path):
    theirs = make(*TINY[name])
    ours = save_and_load(theirs, tmp_path, kernels=kernels)
    want = their_logits(theirs, TOKENS)
    for chunks in ([37], [16, *[1] * 16, 5]):
        got = PagedDriver(ours).prefill(TOKENS, chunks=chunks)
        assert (got - want).abs().max() < 1e-4, chunks
    assert want.std() > 0.05  # a model whose logits say nothing would agree with anything
    assert PagedDriver(ours).greedy(TOKENS, 12) == their_greedy(theirs, TOKENS, 12)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3"])
def test_a_mixed_batch_gives_each_sequence_its_own_logits(name, kernels, tmp_path):
    theirs = make(*TINY[name])
    ours = save_and_load(theirs, tmp_path, kernels=kernels)
    texts = {i: prompt(length, seed=i) for i, length in enumerate((40, 21, 3, 33, 29))}
    want = {i: their_logits(theirs, text) for i, text in texts.items()}
    driver = PagedDriver(ours)
    got: dict[int, list[torch.Tensor]] = {i: [] for i in texts}
    for turn in range(1, 200):
        work = {}
        for i, text in texts.items():
            done = driver.lengths.get(i, 0)
            if done < len(text) and turn > i:  # they arrive one after the other, and go on in steps of other sizes each turn
                work[i] = text[done : done + 1 + (turn * (i + 1)) % 5 * (i % 2)]
        if not work:
            break
        for i, logits in driver.step(work).items():
            got[i].append(logits)
    for i, expected in want.items():
        assert (torch.cat(got[i]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3", "gemma2"])
def test_half_precision_stays_near(name, dtype, kernels, tmp_path):
    theirs = make(*TINY[name])
    ours = save_and_load(theirs, tmp_path, dtype=dtype, kernels=kernels)
    want = their_logits(theirs, TOKENS)
    got = PagedDriver(ours, kv_dtype=dtype).prefill(TOKENS)
    assert got.dtype == torch.float32
    in_bfloat16 = kernels and cpu.load().isa == "amx"  # the products of a prompt, in either dtype
    coarse = 0.12 if dtype == torch.bfloat16 else 0.05 if in_bfloat16 else 0.015
    assert (got - want).pow(2).mean().sqrt() < coarse * want.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-bias", "phi3", "olmo2", "gemma3"])
def test_the_kernels_give_the_same_bits_however_a_prompt_is_cut(name, dtype, tmp_path):
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    ours = save_and_load(make(*TINY[name]), tmp_path, dtype=dtype, kernels=True)
    make_deterministic(ours)  # what torch computes between the kernels
    whole = PagedDriver(ours, kv_dtype=dtype, deterministic=True).prefill(TOKENS)
    for chunks in ([20, 1, 13, 3], [1] * 37):
        assert torch.equal(PagedDriver(ours, kv_dtype=dtype, deterministic=True).prefill(TOKENS, chunks=chunks), whole)


def test_weights_beyond_float16_are_named(tmp_path):
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    theirs = make(*TINY["llama"])
    theirs.model.layers[1].mlp.down_proj.weight.data[3, 5] = 1e5
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' has values beyond float16; use --dtype float32"):
        save_and_load(theirs, tmp_path, dtype=torch.float16, kernels=True)


def test_deterministic_attention_equals_the_plain_one(tmp_path):
    theirs = make(*TINY["gemma2"])
    ours = save_and_load(theirs, tmp_path)
    want = their_logits(theirs, TOKENS)
    got = PagedDriver(ours, deterministic=True).prefill(TOKENS, chunks=[20, 17])
    assert (got - want).abs().max() < 1e-4
