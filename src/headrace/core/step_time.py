"""How long a step takes, learned from the steps that ran.

    seconds = a + b * tokens + c * attended

`tokens` are all tokens of the step; `attended` is the sum over its rows of tokens * context, the work of attention. The coefficients are the
non-negative weighted least squares fit over past steps: weight 1 / seconds^2, so that relative errors count and a short decode step tells as
much as a long prefill, and older steps fade. Real machines are not linear between a memory-bound decode step and a compute-bound
prefill, and they pause: so the ratios of measured to fitted time of the last steps are looked at as well, apart for decode-only steps, for
steps with prompt tokens and for steps with guesses. Their median corrects the line. A long prompt leaves no step of decodes alone for many
seconds; what such a step takes is therefore known from so many of them that a moment's pause right before the prompt does not count.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations
from typing import Literal

FADE = 0.995  # weight of a step after one more step
LAST_STEPS: dict[_Kind, int] = {"decode": 64, "prompt": 16, "guess": 16}  # of each kind, whose ratios are looked at
KEPT_SHARE = 0.75  # of steps with prompt tokens that keep the latency
MIN_STEPS = 4  # before so many steps nothing is predicted
ITL_FACTOR = 2.0  # without a target, a step with one prompt may take so many times a decode-only one
FIRST_CHUNK = 16  # prompt tokens beside decodes before anything is known
GROWTH = 2  # a step with prompt tokens may be so many times as large as any before it: what was never seen can't be predicted
LEAST_S = 1e-9  # nothing takes less
_SCALES = (1.0, 1e-2, 1e-5)  # keep the normal equations well conditioned


_Kind = Literal["decode", "prompt", "guess"]
_Step = tuple[int, int, float]  # tokens, attended, seconds


def _kind(has_prefill: bool, speculates: bool) -> _Kind:
    return "guess" if speculates else "prompt" if has_prefill else "decode"


class StepTimeModel:
    def __init__(self) -> None:
        self.num_steps = 0
        self.num_speculated = 0  # of them had guesses
        self._most_tokens = 0  # of a step with prompt tokens
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xy = [0.0] * 3
        self._coefficients: tuple[float, float, float] | None = None  # a, b, c; None: to be solved again
        self._last: dict[_Kind, deque[_Step]] = {kind: deque(maxlen=count) for kind, count in LAST_STEPS.items()}
        self._ratios: dict[_Kind, list[float]] = {}  # measured / fitted of the last steps, ascending; those that were asked for since the last step

    @property
    def ready(self) -> bool:
        return self.num_steps >= MIN_STEPS

    def knows_prompts_of(self, num_tokens: int) -> bool:
        """Whether steps with about so many prompt tokens were seen; what a much larger one takes cannot be predicted."""
        return self.ready and num_tokens <= GROWTH * self._most_tokens

    def observe(self, *, tokens: int, attended: int, has_prefill: bool, seconds: float, speculates: bool = False) -> None:
        """A step of these features took so many seconds."""
        if seconds <= 0.0 or tokens <= 0:
            return  # a clock that stood still teaches nothing
        features = (_SCALES[0], _SCALES[1] * tokens, _SCALES[2] * attended)
        weight = 1.0 / (seconds * seconds)
        xx, xy = self._xx, self._xy
        for i in range(3):
            weighted = weight * features[i]
            for j in range(3):
                xx[i][j] = FADE * xx[i][j] + weighted * features[j]
            xy[i] = FADE * xy[i] + weighted * seconds
        self._last[_kind(has_prefill, speculates)].append((tokens, attended, seconds))
        self._coefficients = None
        self._ratios.clear()
        self.num_steps += 1
        self.num_speculated += speculates
        if has_prefill:
            self._most_tokens = max(self._most_tokens, tokens)

    def predict(self, *, tokens: int, attended: int, has_prefill: bool, speculates: bool = False) -> float:
        """Seconds that a step of these features takes: as many steps take more as take less."""
        return self._fitted(tokens, attended) * self._ratio(_kind(has_prefill, speculates), 0.5)

    def prefill_chunk(
        self,
        *,
        decode_tokens: int,
        decode_attended: int,
        num_prompts: int,
        context: int,
        limit: int,
        floor: int,
        target_s: float | None,
    ) -> int:
        """Most prompt tokens, from `floor` to `limit`, beside these decodes so that the step keeps the inter-token latency.

        `num_prompts` share the chunk; `context` is the number of tokens before it. `target_s` None: ITL_FACTOR times the predicted
        decode-only step for one prompt. The time beyond that step grows with the root of the number of prompts, and where more prompts than
        decodes wait, with their ratio: a few fluent answers must not hold up many prompts, whose small chunks would leave most of the
        machine's speed unused.
        """
        if limit <= floor:
            return limit
        if not self.ready:
            return min(FIRST_CHUNK, limit)
        if target_s is None:
            factor = 1.0 + (ITL_FACTOR - 1.0) * max(math.sqrt(num_prompts), num_prompts / max(decode_tokens, 1))
            target_s = factor * self.predict(tokens=decode_tokens, attended=decode_attended, has_prefill=False)
        target_s /= self._ratio("prompt", KEPT_SHARE)
        low, high = floor, max(floor, min(limit, max(FIRST_CHUNK, GROWTH * self._most_tokens)))
        while low < high:
            chunk = (low + high + 1) // 2
            attended = decode_attended + chunk * (context + chunk)
            if self._fitted(decode_tokens + chunk, attended) <= target_s:
                low = chunk
            else:
                high = chunk - 1
        return low

    def _ratio(self, kind: _Kind, share: float) -> float:
        """What this share of the last steps of a kind stayed below, measured / fitted; 1 where there were none."""
        ratios = self._ratios.get(kind)
        if ratios is None:
            a, b, c = self._coefficients or self._solve()
            found = [seconds / max(LEAST_S, a + b * tokens + c * attended) for tokens, attended, seconds in self._last[kind]]
            ratios = self._ratios[kind] = sorted(found)
        return ratios[int(share * len(ratios))] if ratios else 1.0

    def _fitted(self, tokens: int, attended: int) -> float:
        a, b, c = self._coefficients or self._solve()
        return max(LEAST_S, a + b * tokens + c * attended)

    def _solve(self) -> tuple[float, float, float]:
        a, b, c = _non_negative_fit(self._xx, self._xy)
        self._coefficients = (a * _SCALES[0], b * _SCALES[1], c * _SCALES[2])
        return self._coefficients


def _non_negative_fit(xx: list[list[float]], xy: list[float]) -> list[float]:
    """Minimise w xx w - 2 w xy over w >= 0: the best of all subsets of features whose unconstrained solution is non-negative."""
    best, best_loss = [0.0] * 3, 0.0
    for size in (3, 2, 1):
        for subset in combinations(range(3), size):
            part = _solve([[xx[i][j] for j in subset] for i in subset], [xy[i] for i in subset])
            if part is None or min(part) < 0.0:
                continue
            full = [0.0] * 3
            for i, value in zip(subset, part, strict=True):
                full[i] = value
            loss = sum(full[i] * (sum(xx[i][j] * full[j] for j in range(3)) - 2 * xy[i]) for i in range(3))
            if loss < best_loss:
                best, best_loss = full, loss
            if size == 3:
                return best  # without a constraint that holds, nothing is better
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None where the features do not differ enough to be told apart."""
    n = len(right)
    rows = [[*matrix[i], right[i]] for i in range(n)]
    scale = max(abs(matrix[i][i]) for i in range(n))
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(rows[k][i]))
        if abs(rows[pivot][i]) <= 1e-12 * scale:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * n
    for i in reversed(range(n)):
        solution[i] = (rows[i][n] - sum(rows[i][j] * solution[j] for j in range(i + 1, n))) / rows[i][i]
    return solution
