"""Random draws that depend on the request and the place in its answer alone, never on the batch, the slot or what ran before.

A token is drawn by the Gumbel-max rule: the token with the largest `logit / temperature + noise` wins, which gives every token exactly
its softmax probability. The noise of token t at output position i of a request is

    seed     = splitmix64(splitmix64(splitmix64(request seed) ^ choice_index) + i)        64 bits; low word a, high word b
    x        = low 32 bits of splitmix64(t)
    x        = (x ^ a) * 0x7FEB352D;  x ^= x >> 15;  x += b
    x        = x * 0x846CA68B;        x ^= x >> 13;  x *= 0x9E3779B1                      all modulo 2**32
    w        = min(((x >> 1) + 0.5) / 2**31, 1 - 2**-24)                                  float32 in (0, 1)
    noise    = -log(-log1p(-w))

Unlike a walk along the cumulated probabilities it does not care how many tokens lie before the drawn one: a logit that differs in its
last bits, because the batch had another shape, changes the draw only where two scores are that close.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(value: int) -> int:
    """The output function of the SplitMix64 generator: a bijection of 64-bit words without visible pattern."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _splitmix64_array(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def request_key(seed: int, choice_index: int) -> int:
    """64 bits from which all draws of one choice of a request come."""
    return splitmix64(splitmix64(seed & _MASK) ^ choice_index)


def unseeded_key(base: int, request_id: str, choice_index: int) -> int:
    """The same for a request without a seed: `base` is the engine's seed, and a restart of the request after preemption finds its key again."""
    digest = blake2b(request_id.encode(), digest_size=8, key=(base & _MASK).to_bytes(8, "little")).digest()
    return request_key(int.from_bytes(digest, "little"), choice_index)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


class TokenNoise:
    """Gumbel noise for every token of a vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        words = _splitmix64_array(np.arange(vocab_size, dtype=np.uint64)).astype(np.uint32).view(np.int32)
        self._word_V = torch.from_numpy(words).to(device)

    def gumbel(self, key_R: np.ndarray, position_R: np.ndarray, ids_RK: Tensor | None = None) -> Tensor:
        """float32 [R, V], or [R, K] for the tokens `ids_RK`, of rows with these keys (uint64) at these output positions (int64)."""
        seed_R = _splitmix64_array(key_R + position_R.astype(np.uint64))
        halves_R2 = torch.from_numpy(seed_R.view(np.int32).reshape(-1, 2)).to(self._word_V.device)  # little endian: low word first
        word = self._word_V[None, :] if ids_RK is None else self._word_V[ids_RK]
        x = word ^ halves_R2[:, :1]
        x *= _signed(0x7FEB352D)
        x ^= (x >> 15).bitwise_and_(0x1FFFF)  # the mask makes the shift a logical one
        x += halves_R2[:, 1:]
        x *= _signed(0x846CA68B)
        x ^= (x >> 13).bitwise_and_(0x7FFFF)
        x *= _signed(0x9E3779B1)
        w = (x >> 1).bitwise_and_(0x7FFFFFFF).to(torch.float32)
        w = w.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
        return w.neg_().log1p_().neg_().log_().neg_()
