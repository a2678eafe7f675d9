"""How long a step takes, learned from the steps that ran.

    seconds = a + b * decode tokens + c * what they attend to + [a step with prompt tokens] (d + e * prompt tokens + f * what they attend to)

A decode row and a prompt token cost differently: the one reads the head's weights, and its keys and values for itself alone; the others
share what is read, but for what a step pays once that holds any of them. What tokens attend to is the sum over rows of tokens * context,
the work of attention. The coefficients are the non-negative weighted least squares fit over past steps: weight 1 / seconds^2, so that
relative errors count and a short decode step tells as much as a long prefill. Steps fade with each one more of their kind. Real machines
are not linear between a memory-bound decode step and a compute-bound prefill, and they pause: so the ratios of measured to fitted time of
the last steps are looked at as well, apart for decode-only steps, for steps with prompt tokens and for steps with guesses. Their median
corrects the line. A long prompt leaves no step of decodes alone for many seconds; what such a step takes is therefore known from so many of
them that a moment's pause right before the prompt does not count.
"""

from __future__ import annotations

import math
from collections import deque
from operator import add, mul
from typing import Literal

from headrace.core.step_work import StepWork

FADE = 0.995  # weight of a step after one more of its kind
LAST_STEPS: dict[_Kind, int] = {"decode": 64, "prompt": 16, "guess": 16}  # of each kind, whose ratios are looked at
KEPT_SHARE = 0.75  # of steps with prompt tokens that keep the latency
MIN_STEPS = 4  # before so many steps nothing is predicted
ITL_FACTOR = 2.0  # without a target, a step with one prompt may take so many times a decode-only one, and what prompts cost at all
FIRST_CHUNK = 16  # prompt tokens beside decodes before anything is known
GROWTH = 2  # a step with prompt tokens may be so many times as large as any before it: what was never seen can't be predicted
LEAST_S = 1e-9  # nothing takes less
_SCALES = (1.0, 0.1, 1e-4, 1.0, 1e-2, 1e-5)  # keep the normal equations well conditioned
# What always went together is told apart by these: the fit is a ridge regression with so large a share of each feature's own square. The time of
# decode steps of one size goes to the start of a step, for they wait for weights; that of prompts of one size to their tokens, lest many seem to cost
# as few.
_RIDGE = (1e-6, 1e-5, 1e-4, 1e-4, 1e-6, 1e-4)
_ANY_PROMPT = (0.0, 0.0, 0.0, _SCALES[3], 0.0, 0.0)  # what a step pays for holding any prompt token at all, as features
_ROUNDING = 1e-9
_EXCHANGES = 24  # of features in and out of the fit; so many are never needed but by rounding


_Kind = Literal["decode", "prompt", "guess"]
_Features = tuple[float, float, float, float, float, float]


def _kind(work: StepWork, speculates: bool) -> _Kind:
    return "guess" if speculates else "prompt" if work.prompt_tokens else "decode"


def _features(work: StepWork) -> _Features:
    decode_tokens, decode_attended, prompt_tokens, prompt_attended, _ = work
    return (
        _SCALES[0],
        _SCALES[1] * decode_tokens,
        _SCALES[2] * decode_attended,
        _SCALES[3] * (prompt_tokens > 0),
        _SCALES[4] * prompt_tokens,
        _SCALES[5] * prompt_attended,
    )


class _Sums:
    """The normal equations of some steps: sums of features * features and of features * seconds, weighted."""

    def __init__(self) -> None:
        self.xx = [[0.0] * (i + 1) for i in range(len(_SCALES))]  # its lower half
        self.xy = [0.0] * len(_SCALES)

    def add(self, features: _Features, seconds: float) -> None:
        weight = 1.0 / (seconds * seconds)
        for i, (row, feature) in enumerate(zip(self.xx, features, strict=True)):
            weighted = weight * feature
            for j in range(i + 1):
                row[j] = FADE * row[j] + weighted * features[j]
            self.xy[i] = FADE * self.xy[i] + weighted * seconds


class StepTimeModel:
    def __init__(self) -> None:
        self.num_steps = 0
        self.num_speculated = 0  # of them had guesses
        self._most_tokens = 0  # of prompts in a step
        self._without, self._with = _Sums(), _Sums()  # over steps without and with prompt tokens
        self._coefficients = [0.0] * len(_SCALES)  # of the scaled features
        self._is_solved = False
        self._last: dict[_Kind, deque[tuple[_Features, float]]] = {kind: deque(maxlen=count) for kind, count in LAST_STEPS.items()}
        self._ratios: dict[_Kind, list[float]] = {}  # measured / fitted of the last steps, ascending; those that were asked for since the last step

    @property
    def ready(self) -> bool:
        return self.num_steps >= MIN_STEPS

    def knows_prompts_of(self, num_tokens: int) -> bool:
        """Whether steps with about so many prompt tokens were seen; what a much larger one takes cannot be predicted."""
        return self.ready and num_tokens <= GROWTH * self._most_tokens

    def observe(self, work: StepWork, *, seconds: float, speculates: bool = False) -> None:
        """A step of this work took so many seconds."""
        if seconds <= 0.0 or work.decode_tokens + work.prompt_tokens <= 0:
            return  # a clock that stood still teaches nothing
        features = _features(work)
        (self._with if work.prompt_tokens else self._without).add(features, seconds)
        self._last[_kind(work, speculates)].append((features, seconds))
        self._is_solved = False
        self._ratios.clear()
        self.num_steps += 1
        self.num_speculated += speculates
        self._most_tokens = max(self._most_tokens, work.prompt_tokens)

    def predict(self, work: StepWork, *, speculates: bool = False) -> float:
        """Seconds that a step of this work takes: as many steps take more as take less."""
        return self._fitted(_features(work)) * self._ratio(_kind(work, speculates), 0.5)

    def prefill_chunk(self, beside: StepWork, *, num_prompts: int, context: int, limit: int, floor: int, target_s: float | None) -> int:
        """Most prompt tokens, from `floor` to `limit`, beside this work so that the step keeps the inter-token latency.

        `num_prompts` share the chunk; `context` is the number of tokens before it. `target_s` None: ITL_FACTOR times the predicted
        step without the chunk for one prompt, and beyond that what a step pays for holding any prompt token at all: where that is as much as the
        step itself, chunks of a few tokens would pay it over and over, and disturb for much longer than they spare. The time for the tokens
        grows with the root of the number of prompts, and where more prompts than decodes wait, with their ratio: a few fluent answers must not
        hold up many prompts, whose small chunks would leave most of the machine's speed unused.
        """
        if limit <= floor:
            return limit
        if not self.ready:
            return min(FIRST_CHUNK, limit)
        if target_s is None:
            factor = 1.0 + (ITL_FACTOR - 1.0) * max(math.sqrt(num_prompts), num_prompts / max(beside.decode_tokens, 1))
            target_s = factor * self.predict(beside) + self._fitted(_ANY_PROMPT)
        target_s /= self._ratio("prompt", KEPT_SHARE)
        low, high = floor, max(floor, min(limit, max(FIRST_CHUNK, GROWTH * self._most_tokens)))
        while low < high:
            chunk = (low + high + 1) // 2
            if self._fitted(_features(beside.with_prompt(chunk, context))) <= target_s:
                low = chunk
            else:
                high = chunk - 1
        return low

    def _ratio(self, kind: _Kind, share: float) -> float:
        """What this share of the last steps of a kind stayed below, measured / fitted; 1 where there were none."""
        ratios = self._ratios.get(kind)
        if ratios is None:
            ratios = self._ratios[kind] = sorted([seconds / self._fitted(features) for features, seconds in self._last[kind]])
        return ratios[int(share * len(ratios))] if ratios else 1.0

    def _fitted(self, features: _Features) -> float:
        if not self._is_solved:
            xx = [list(map(add, *rows)) for rows in zip(self._without.xx, self._with.xx, strict=True)]
            for i, share in enumerate(_RIDGE):
                xx[i][i] *= 1.0 + share
            self._coefficients = _non_negative_fit(xx, list(map(add, self._without.xy, self._with.xy)), self._coefficients)
            self._is_solved = True
        a, b, c, d, e, f = self._coefficients
        one, decode_tokens, decode_attended, has_prompt, prompt_tokens, prompt_attended = features
        seconds = a * one + b * decode_tokens + c * decode_attended + d * has_prompt + e * prompt_tokens + f * prompt_attended
        return seconds if seconds > LEAST_S else LEAST_S  # written out: this is called dozens of times a step


def _non_negative_fit(xx: list[list[float]], xy: list[float], start: list[float]) -> list[float]:
    """Minimise w xx w - 2 w xy over w >= 0. `xx` is symmetric, of which the lower half counts; `start`: an earlier solution, which is often near.

    Features whose coefficient would be negative leave the fit, and those enter that would lower the loss, one at a time, until neither is left
    (an active set method, as in Lawson and Hanson, Solving Least Squares Problems, chapter 23).
    """
    taken = [i for i, value in enumerate(start) if value > 0.0]
    best, best_loss = start, math.inf
    for _ in range(_EXCHANGES):
        part = _solve(xx, xy, taken)
        lowest = min(range(len(taken)), key=part.__getitem__, default=None)
        if lowest is not None and part[lowest] < 0.0:
            del taken[lowest]
            continue
        found = [0.0] * len(xy)
        for i, value in zip(taken, part, strict=True):
            found[i] = value
        slopes = [y - sum(xx[max(i, j)][min(i, j)] * found[j] for j in taken) for i, y in enumerate(xy)]
        loss = -sum(value * (xy[i] + slopes[i]) for i, value in zip(taken, part, strict=True))
        if loss >= best_loss:
            break  # it went round
        best, best_loss = found, loss
        outside = [i for i in range(len(xy)) if i not in taken and slopes[i] > _ROUNDING * abs(xy[i])]
        if not outside:
            break
        taken = sorted([*taken, max(outside, key=lambda i: slopes[i] * slopes[i] / xx[i][i])])
    return best


def _solve(matrix: list[list[float]], right: list[float], chosen: list[int]) -> list[float]:
    """The solution for the chosen features, by Cholesky's method."""
    lower: list[list[float]] = []
    half: list[float] = []
    for row, i in enumerate(chosen):
        line: list[float] = []
        for column in range(row):
            above = lower[column]
            line.append((matrix[i][chosen[column]] - sum(map(mul, line, above))) / above[column])
        square = matrix[i][i] - sum(map(mul, line, line))
        line.append(math.sqrt(max(square, _ROUNDING * matrix[i][i])))
        half.append((right[i] - sum(map(mul, line, half))) / line[row])
        lower.append(line)
    solution = [0.0] * len(chosen)
    for row in reversed(range(len(chosen))):
        rest = sum(lower[below][row] * solution[below] for below in range(row + 1, len(chosen)))
        solution[row] = (half[row] - rest) / lower[row][row]
    return solution
