from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.core.messages import SlotStart
from headrace.runner.draws import TokenNoise, request_key, unseeded_key
from headrace.runner.filters import keep
from headrace.runner.grammar_masks import GrammarMasks
from headrace.runner.interface import NON_FINITE
from headrace.runner.sampler import NOTHING_LEFT, Sampled, Sampler
from headrace.runner.sampling_table import SamplingTable
from headrace.runner.token_history import TokenHistory
from headrace.sampling_params import SamplingParams
from tests.runner.naive_sampler import kept as kept_by_sort
from tests.runner.naive_sampler import naive_noise, naive_sample

CPU = torch.device("cpu")
VOCAB = 40
SLOTS = 8


class Bench:
    """A sampler with its slots."""

    def __init__(self, vocab_size: int = VOCAB, slots: int = SLOTS) -> None:
        self.vocab_size = vocab_size
        self.table = SamplingTable(slots)
        self.history = TokenHistory(num_slots=slots, max_model_len=64)
        masks = GrammarMasks(None, num_slots=slots, num_threads=1)
        self.sampler = Sampler(table=self.table, history=self.history, masks=masks, vocab_size=vocab_size, device=CPU)

    def start(self, slot: int, params: SamplingParams, *, prompt: Sequence[int] = (1,), answer: Sequence[int] = (), eos: tuple[int, ...] = ()) -> int:
        key = request_key(params.seed or 0, params.choice_index)
        start = SlotStart(
            request_id=str(slot), slot=slot, token_ids=(*prompt, *answer), num_prompt_tokens=len(prompt), params=params, eos_token_ids=eos
        )
        self.history.start(start)
        assert self.table.start(start, key=key, vocab_size=self.vocab_size) is None
        return key

    def sample(self, logits: torch.Tensor, slots: list[int]) -> Sampled:
        before = logits.clone()
        sampled = self.sampler.sample(logits, slots)
        assert torch.equal(torch.nan_to_num(logits), torch.nan_to_num(before)), "the raw logits must stay for the log probabilities"
        return sampled


tokens = st.integers(0, VOCAB - 1)
params_strategy = st.builds(
    lambda **fields: SamplingParams(max_tokens=None, **{k: v for k, v in fields.items() if v is not None}),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.7, 50.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, VOCAB, VOCAB + 5]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    logit_bias=st.none() | st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=4),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=12).map(tuple),
    bad_words_ids=st.none() | st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    stop_token_ids=st.none() | st.lists(tokens, max_size=2).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3, 9]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice_index=st.integers(0, 3),
    logprobs=st.none() | st.integers(0, 5),
)
row_strategy = st.tuples(
    params_strategy,
    st.lists(tokens, min_size=1, max_size=6),
    st.lists(tokens, max_size=6),
    st.lists(tokens, max_size=2).map(tuple),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(row_strategy, min_size=1, max_size=SLOTS))
def test_every_option_as_in_the_naive_sampler(rows: list[Any]) -> None:
    bench = Bench()
    logits = torch.stack([torch.randn(VOCAB, generator=torch.Generator().manual_seed(row[4])) * 3 for row in rows])
    slots = list(range(len(rows)))[::-1]
    expected = []
    for slot, (params, prompt, answer, eos, _), row in zip(slots, rows, logits, strict=True):
        key = bench.start(slot, params, prompt=prompt, answer=answer, eos=eos)
        expected.append(naive_sample(row.tolist(), params, key=key, eos=eos, prompt=prompt, answer=answer))
    assume(all(margin > 1e-4 or margin == 0 for _, margin in expected))
    sampled = bench.sample(logits, slots)
    for (token, _), got, error in zip(expected, sampled.token_ids, sampled.errors, strict=True):
        assert error == (NOTHING_LEFT if token is None else None)
        assert got == (token or 0)
    for (params, *_), row, got, error, entry in zip(rows, logits, sampled.token_ids, sampled.errors, sampled.logprobs, strict=True):
        if params.logprobs is None or error is not None:
            assert entry is None
            continue
        log_probs = torch.log_softmax(row.double(), 0)
        assert entry is not None
        assert entry.token_id == got
        assert entry.logprob == pytest.approx(float(log_probs[got]), abs=1e-5)
        order = sorted(range(VOCAB), key=lambda t: -float(row[t]))
        assert entry.rank == order.index(got) + 1
        assert [t for t, _ in entry.top] == order[: params.logprobs]
        assert [p for _, p in entry.top] == pytest.approx([float(log_probs[t]) for t in order[: params.logprobs]], abs=1e-5)


def test_the_fast_path_is_the_argmax() -> None:
    bench = Bench()
    for slot in range(SLOTS):
        bench.start(slot, SamplingParams(temperature=0.0))
    logits = torch.randn(SLOTS, VOCAB)
    sampled = bench.sample(logits, list(range(SLOTS)))
    assert sampled.token_ids == logits.argmax(dim=1).tolist()
    assert sampled.logprobs == [None] * SLOTS


def test_noise_follows_its_formula() -> None:
    noise = TokenNoise(50, CPU)
    keys = np.array([0, 1, 2**64 - 1, request_key(-5, 2)], dtype=np.uint64)
    positions = np.array([0, 7, 3, 100_000])
    got = noise.gumbel(keys, positions)
    for row, (key, position) in enumerate(zip(keys.tolist(), positions.tolist(), strict=True)):
        assert got[row].tolist() == pytest.approx([naive_noise(key, position, token) for token in range(50)], rel=1e-4, abs=1e-5)
    ids = torch.tensor([[3, 49], [0, 1], [7, 7], [20, 2]])
    assert torch.equal(noise.gumbel(keys, positions, ids), got.gather(1, ids))


@pytest.mark.parametrize("vary", ["position", "seed", "choice"])
def test_draws_follow_the_softmax(vary: str) -> None:
    """Chi-square over tokens, whatever it is that changes between the draws; and no link between one draw and the next."""
    count, size = 20_000, 12
    logits = torch.linspace(-2, 2, size)
    noise = TokenNoise(size, CPU)
    index = np.arange(count)
    keys = {
        "position": np.full(count, request_key(1234, 0), dtype=np.uint64),
        "seed": np.array([request_key(i, 0) for i in range(count)], dtype=np.uint64),
        "choice": np.array([request_key(1234, i) for i in range(count)], dtype=np.uint64),
    }[vary]
    positions = index if vary == "position" else np.zeros(count, dtype=np.int64)
    picked = (logits + noise.gumbel(keys, positions)).argmax(dim=1)
    expected = torch.softmax(logits, 0).double() * count
    seen = torch.bincount(picked, minlength=size).double()
    assert float(((seen - expected) ** 2 / expected).sum()) < 31.3  # 11 degrees of freedom, p = 0.001
    pairs = torch.bincount(picked[:-1] * size + picked[1:], minlength=size * size).double()
    expected_pairs = torch.outer(expected, expected).flatten() / count
    assert float(((pairs - expected_pairs) ** 2 / expected_pairs).sum()) < 200  # 143 degrees of freedom, p = 0.001


def test_noise_is_gumbel_distributed() -> None:
    values = TokenNoise(30_000, CPU).gumbel(np.array([5], dtype=np.uint64), np.array([9])).double().flatten().sort().values
    cumulated = torch.exp(-torch.exp(-values))
    steps = torch.arange(1, len(values) + 1) / len(values)
    assert float((cumulated - steps).abs().max()) < 1.95 / math.sqrt(len(values))  # Kolmogorov-Smirnov, p = 0.001


def test_a_seeded_row_does_not_see_its_batch_mates() -> None:
    torch.manual_seed(0)
    mates = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, seed=7),
        SamplingParams(temperature=0.8, top_p=0.7, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, top_k=3, logprobs=4),
        SamplingParams(temperature=1.0, min_p=0.1, logit_bias={3: 2.0}),
    ]
    for params in (SamplingParams(seed=11), SamplingParams(seed=11, top_p=0.9), SamplingParams(seed=11, top_k=5, presence_penalty=1.0)):
        mine = torch.randn(1, VOCAB)
        alone = Bench()
        alone.start(3, params, prompt=[1, 2], answer=[4])
        wanted = alone.sample(mine, [3]).token_ids[0]
        for count in range(1, len(mates) + 1):
            bench = Bench()
            for slot, mate in enumerate(mates[:count]):
                bench.start(slot, mate)
            bench.start(6, params, prompt=[1, 2], answer=[4])
            others = torch.randn(count, VOCAB)
            assert bench.sample(torch.cat([others, mine]), [*range(count), 6]).token_ids[-1] == wanted
            assert bench.sample(torch.cat([mine, others]), [6, *range(count)]).token_ids[0] == wanted


def test_keys_differ_between_seeds_choices_requests_and_engines() -> None:
    keys = {request_key(seed, choice) for seed in range(-50, 50) for choice in range(20)}
    keys |= {unseeded_key(base, f"r{i}", choice) for base in range(5) for i in range(20) for choice in range(4)}
    assert len(keys) == 100 * 20 + 5 * 20 * 4
    assert unseeded_key(1, "a", 0) == unseeded_key(1, "a", 0)


def test_filtered_and_full_draws_agree() -> None:
    """A filter that lets everything pass changes nothing, though its candidates are drawn another way."""
    torch.manual_seed(1)
    vocab_size = 1000
    bench = Bench(vocab_size=vocab_size, slots=64)
    logits = torch.randn(64, vocab_size)
    for slot in range(64):
        bench.start(slot, SamplingParams(seed=slot))
    full = bench.sample(logits, list(range(64))).token_ids
    for slot in range(64):
        bench.start(slot, SamplingParams(seed=slot, top_k=vocab_size))
    assert bench.sample(logits, list(range(64))).token_ids == full
    for slot in range(64):
        bench.start(slot, SamplingParams(seed=slot, min_p=1e-30))
    assert bench.sample(logits, list(range(64))).token_ids == full


def test_flat_distributions_need_more_candidates_than_the_first_guess() -> None:
    vocab_size = 5000
    bench = Bench(vocab_size=vocab_size, slots=2)
    logits = torch.stack([torch.linspace(0, 1e-3, vocab_size), torch.zeros(vocab_size)])  # row 1: all tokens tie with the second
    seen: tuple[set[int], set[int]] = (set(), set())
    for seed in range(200):
        bench.start(0, SamplingParams(seed=seed, top_p=0.5))
        bench.start(1, SamplingParams(seed=seed, top_k=2))
        for row, token in enumerate(bench.sample(logits, [0, 1]).token_ids):
            seen[row].add(token)
    assert min(seen[0]) >= vocab_size // 2 - 1
    assert len(seen[0]) > 50
    assert len(seen[1]) > 50


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9, logprobs=3)])
def test_a_row_of_non_finite_logits_fails_alone(poison: float, params: SamplingParams) -> None:
    bench = Bench()
    for slot in range(3):
        bench.start(slot, params)
    logits = torch.randn(3, VOCAB)
    wanted = bench.sample(logits, [0, 1, 2])
    logits[1, 5] = poison
    sampled = bench.sample(logits, [0, 1, 2])
    assert sampled.errors == [None, NON_FINITE, None]
    assert sampled.logprobs[1] is None
    for row in (0, 2):
        assert sampled.token_ids[row] == wanted.token_ids[row]
        assert sampled.logprobs[row] == wanted.logprobs[row]


def test_logprobs_are_finite_even_of_impossible_tokens() -> None:
    bench = Bench()
    bench.start(0, SamplingParams(temperature=0.0, logprobs=20, logit_bias={3: 100.0}))
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 1] = 2.0
    logits[0, 3] = -1e30
    entry = bench.sample(logits, [0]).logprobs[0]
    assert entry is not None
    assert entry.top[0] == (1, 0.0)
    assert all(math.isfinite(value) for _, value in entry.top)


@pytest.mark.parametrize("field", [{"logit_bias": {VOCAB: 1.0}}, {"allowed_token_ids": (VOCAB,)}, {"bad_words_ids": ((1, -1),)}])
def test_a_token_beyond_the_vocabulary_is_named(field: dict[str, Any]) -> None:
    start = SlotStart(request_id="a", slot=0, token_ids=(1,), num_prompt_tokens=1, params=SamplingParams(**field), eos_token_ids=())
    reason = SamplingTable(1).start(start, key=0, vocab_size=VOCAB)
    assert reason is not None
    assert "vocabulary has 40" in reason


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([1e-3, 0.3, 1.0, 4.0, 30.0]),
    decimals=st.sampled_from([0, 1, 6]),
    top_p=st.sampled_from([0.3, 0.9, 0.999]),
    top_k=st.sampled_from([0, 3, 200, 500]),
    min_p=st.sampled_from([0.0, 0.05]),
)
def test_filters_keep_what_a_full_sort_keeps(seed: int, spread: float, decimals: int, top_p: float, top_k: int, min_p: float) -> None:
    """Steep and flat distributions, with many equal logits and without, of more tokens than are looked at first."""
    vocab_size = 900
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    x = (logits * 10**decimals).round() / 10**decimals
    if seed % 3 == 0:
        x[0, 1::7] = -math.inf
    x -= x.max()
    params = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k, min_p=min_p)
    wanted, margin = kept_by_sort(x[0].tolist(), params)
    assume(margin > 1e-5)
    got = keep(x, top_k_R=torch.tensor([top_k]), top_p_R=torch.tensor([top_p]), min_p_R=torch.tensor([min_p]))
    stay = set(torch.nonzero((x[0] >= got.floor_R1[0]) & (x[0] > -math.inf)).flatten().tolist())
    assert stay == wanted
    if bool(got.fits_R[0]):
        assert set(got.ids_RK[0][got.values_RK[0] > -math.inf].tolist()) == wanted
    else:
        assert len(wanted) > 128
