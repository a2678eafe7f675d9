"""The default model against transformers with the same dequantised weights."""

from __future__ import annotations

import pytest
import torch

from headrace.models.decoder import Decoder
from headrace.models.loader import find_gguf, load_model
from headrace.models.store import resolve_model
from tests.models.paged_driver import PagedDriver
from tests.models.real_reference import transformers_model
from tests.models.tiny_models import their_greedy, their_logits

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def path():
    return find_gguf(resolve_model(None, progress=False))


@pytest.fixture(scope="module")
def ours(path) -> Decoder:
    return load_model(str(path), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def theirs(path):
    return transformers_model(path)


def some_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    return torch.randint(17, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_equal_transformers(ours, theirs):
    """Beyond position 500, where a wrong rotary base or layout of q and k rows can't hide."""
    tokens = some_tokens(530, ours.config.vocab_size, seed=1)
    want = their_logits(theirs, tokens)
    driver = PagedDriver(ours, num_blocks=64, block_size=16)
    got = driver.prefill(tokens, chunks=[256, 256, 17, 1])
    assert (got - want).abs().max() < 1e-3
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_greedy_ids_equal_transformers(ours, theirs):
    text = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]  # a short chat
    assert PagedDriver(ours, block_size=16).greedy(text, 16) == their_greedy(theirs, text, 16)


def test_deterministic_attention_gives_the_same_ids(ours):
    text = some_tokens(40, ours.config.vocab_size, seed=2)
    plain = PagedDriver(ours, block_size=16).greedy(text, 8)
    assert PagedDriver(ours, block_size=16, deterministic=True).greedy(text, 8) == plain
