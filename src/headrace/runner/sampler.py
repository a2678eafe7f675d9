"""From logits to tokens, for all rows of a step at once; each row pays only for what its request asks.

Rows fall into four kinds: greedy ones take the largest logit and are done; greedy ones with shaped logits, random ones, and random ones
with top_k, top_p or min_p. See `draws` for the draw, `logit_shaping` and `filters` for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core.messages import TokenLogprobs
from headrace.runner.draws import TokenNoise
from headrace.runner.filters import keep
from headrace.runner.grammar_masks import GrammarMasks
from headrace.runner.interface import NON_FINITE
from headrace.runner.logit_shaping import shape_logits
from headrace.runner.logprobs import token_logprobs
from headrace.runner.sampling_table import SHAPED, Need, SamplingTable
from headrace.runner.token_history import TokenHistory

NOTHING_LEFT = "no token is left to sample: allowed_token_ids, bad_words, min_tokens and the grammar exclude every one"
_CPU_CHUNK = 1 << 17  # logits that get their noise at once: a few passes over what stays in the cache
_CUDA_CHUNK = 1 << 25


@dataclass(slots=True, kw_only=True)
class Sampled:
    """What came of each row; a row with an error has token 0 and no log probabilities."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


class Sampler:
    def __init__(self, *, table: SamplingTable, history: TokenHistory, masks: GrammarMasks, vocab_size: int, device: torch.device) -> None:
        self._table = table
        self._history = history
        self._masks = masks
        self._noise = TokenNoise(vocab_size, device)

    def sample(self, logits_RV: Tensor, slots: list[int], num_guesses: Sequence[int] | None = None) -> Sampled:
        """The next token of each row. logits: float32 [R, V], not changed; `slots`: the slot of each row.

        `num_guesses`: how many of the slot's guesses (`TokenHistory.guess`) belong to the row's history; None: none. Rows of one slot differ
        in it.
        """
        slot_R = np.asarray(slots, dtype=np.int64)
        need_R = self._table.need[slot_R]
        if not need_R.any():
            return _largest(logits_RV)
        length_R = self._history.length_S[slot_R]
        if num_guesses is not None:
            length_R += num_guesses
        held = slot_R[need_R & Need.GRAMMAR != 0].tolist()
        faults = self._masks.wait(held) if held else {}
        token_R = _argmax(logits_RV)
        finite_R = torch.isfinite(logits_RV.gather(1, token_R[:, None]).squeeze(1))  # the largest is NaN if any is
        left_R = torch.ones_like(finite_R)
        shaped_R, random_R, filtered_R = need_R & SHAPED != 0, need_R & Need.RANDOM != 0, need_R & Need.FILTER != 0
        for pick, chosen_R in ((None, shaped_R & ~random_R), (self._draw_any, random_R & ~filtered_R), (self._draw_filtered, filtered_R)):
            chosen = np.flatnonzero(chosen_R)
            if not len(chosen):
                continue
            rows = torch.from_numpy(chosen).to(logits_RV.device)
            x_RV = logits_RV.index_select(0, rows)
            if (need_R[chosen] & SHAPED).any():
                shape_logits(x_RV, slot_R[chosen], length_R[chosen], self._table, self._history, self._masks)
                left_R[rows] = x_RV.amax(dim=1) != float("-inf")
            token_R[rows] = _argmax(x_RV) if pick is None else pick(x_RV, slot_R[chosen], length_R[chosen])
        errors = [
            NON_FINITE if not finite else faults.get(slot, None if left else NOTHING_LEFT)
            for slot, finite, left in zip(slots, finite_R.tolist(), left_R.tolist(), strict=True)
        ]
        token_ids = [token if error is None else 0 for token, error in zip(token_R.tolist(), errors, strict=True)]
        logprobs: list[TokenLogprobs | None] = [None] * len(slots)
        wanted = [row for row in np.flatnonzero(need_R & Need.LOGPROBS).tolist() if errors[row] is None]
        if wanted:
            rows = torch.tensor(wanted, device=logits_RV.device)
            counts = self._table.logprobs[slot_R[wanted]].tolist()
            for row, entry in zip(wanted, token_logprobs(logits_RV.index_select(0, rows), token_R[rows], counts), strict=True):
                logprobs[row] = entry
        return Sampled(token_ids=token_ids, logprobs=logprobs, errors=errors)

    def _scale(self, x_RV: Tensor, slot_R: np.ndarray) -> None:
        """Divides by the temperature, with the largest logit at 0 so that nothing overflows."""
        x_RV.sub_(x_RV.amax(dim=1, keepdim=True)).div_(self._column(self._table.temperature, slot_R, x_RV.device)[:, None])

    def _column(self, values_S: np.ndarray, slot_R: np.ndarray, device: torch.device) -> Tensor:
        return torch.from_numpy(values_S[slot_R]).to(device)

    def _seeds(self, slot_R: np.ndarray, length_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._table.key[slot_R], length_R - self._history.num_prompt_S[slot_R]

    def _draw_any(self, x_RV: Tensor, slot_R: np.ndarray, length_R: np.ndarray) -> Tensor:
        self._scale(x_RV, slot_R)
        return self._draw(x_RV, slot_R, length_R)

    def _draw_filtered(self, x_RV: Tensor, slot_R: np.ndarray, length_R: np.ndarray) -> Tensor:
        self._scale(x_RV, slot_R)
        table, device = self._table, x_RV.device
        kept = keep(
            x_RV,
            top_k_R=self._column(table.top_k, slot_R, device),
            top_p_R=self._column(table.top_p, slot_R, device),
            min_p_R=self._column(table.min_p, slot_R, device),
        )
        best_R = _argmax(kept.values_RK + self._noise.gumbel(*self._seeds(slot_R, length_R), kept.ids_RK))
        token_R = kept.ids_RK.gather(1, best_R[:, None]).squeeze(1)
        many = torch.nonzero(~kept.fits_R).squeeze(1)
        if len(many):
            rest_RV = x_RV[many]
            rest_RV.masked_fill_(rest_RV < kept.floor_R1[many], float("-inf"))
            rest = many.cpu().numpy()
            token_R[many] = self._draw(rest_RV, slot_R[rest], length_R[rest])
        return token_R

    def _draw(self, x_RV: Tensor, slot_R: np.ndarray, length_R: np.ndarray) -> Tensor:
        """A token of each row by softmax probability."""
        key_R, position_R = self._seeds(slot_R, length_R)
        step = max(1, (_CPU_CHUNK if x_RV.device.type == "cpu" else _CUDA_CHUNK) // x_RV.shape[1])
        picked = []
        for first in range(0, len(slot_R), step):
            part = slice(first, first + step)
            picked.append(_argmax(x_RV[part].add_(self._noise.gumbel(key_R[part], position_R[part]))))
        return torch.cat(picked)


def _largest(logits_RV: Tensor) -> Sampled:
    """What `Sampler.sample` gives where all rows are greedy and ask for nothing else, as most batches are, without the passes for the rest."""
    token_R = _argmax(logits_RV)
    finite = torch.isfinite(logits_RV.gather(1, token_R[:, None])).squeeze(1).tolist()
    errors = [None if fine else NON_FINITE for fine in finite]
    token_ids = [token if fine else 0 for token, fine in zip(token_R.tolist(), finite, strict=True)]
    return Sampled(token_ids=token_ids, logprobs=[None] * len(finite), errors=errors)


def _argmax(x_RV: Tensor) -> Tensor:
    """int64 [R]: the first of the largest, or of the NaNs. NumPy's is several times faster on CPU."""
    if x_RV.device.type == "cpu":
        return torch.from_numpy(x_RV.numpy().argmax(axis=1))
    return x_RV.argmax(dim=1)
