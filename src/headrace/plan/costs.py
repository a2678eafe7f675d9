"""How long a step takes, from what is in it: fitted to measured steps, or a roofline (`devices`).

The scheduler has a model of its own (`core.step_time`), six numbers that it learns while it serves. This one is fitted once, to all that was
measured:

    seconds = base(tokens) + p * has_prefill + a * sampled + b * context + c * attended

`base` rises piecewise linearly with the tokens of the step: a few rows cost as much as one, as long as the weights are what a step waits for,
and many cost what their products cost. All slopes are non-negative (a weighted least squares fit of relative errors). What a step takes beside
that, because a real machine pauses, is drawn from the ratios of measured to fitted time of the measured steps of about its size. Weights are taken
from the fit itself and not from the measured times: else the steps that happened to be fast would count most, and the fit would lie below them all.
"""

from __future__ import annotations

import json
import random
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace.errors import ConfigError

KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 32768)
BENCH_STEP = "headrace-step-1"
ROUNDS = 6  # of fits, each weighted by the one before
LEAST_RATIOS = 40  # that a step's noise is drawn from
LEAST_S = 1e-9  # no step takes less
SWEEPS = 2000  # of coordinate descent; a dozen features need far fewer


_Kind = tuple[bool, int]  # whether it has prompt tokens, and the index of the knot below its size


class StepShape(NamedTuple):
    """What is in a step."""

    tokens: int  # of all rows
    sampled: int  # rows that yield a token
    context: int  # sum over rows of one token of the positions that they attend to
    attended: int  # sum over the other rows of tokens * positions before and in them
    has_prefill: bool  # some row has more than one token, or is a prompt's last


class Costs(Protocol):
    def seconds(self, shape: StepShape) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured step."""

    tokens: int
    sampled: int
    context: int
    attended: int
    has_prefill: bool
    seconds: float

    @property
    def shape(self) -> StepShape:
        return StepShape(self.tokens, self.sampled, self.context, self.attended, self.has_prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that was measured of a server: what `--step-costs` keeps."""

    model: str
    machine: str
    flags: tuple[str, ...] | None  # that it was started with; None: not told
    num_blocks: int
    block_size: int
    max_model_len: int
    handoff_s: float  # from the end of a step to the start of the one that was planned ahead
    before_s: float  # from sending a request to the engine's inbox, without
    before_token_s: float  # for each token of its prompt
    after_s: float  # from the end of a step to the client that reads its token
    samples: tuple[Sample, ...]

    def write(self, path: Path) -> None:
        columns = {field.name: [getattr(sample, field.name) for sample in self.samples] for field in fields(Sample)}
        path.write_text(json.dumps({"object": "step_costs", **asdict(self), "samples": columns}) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Measured:
        """What `write` has written, or `headrace bench step --json`. Raises `ConfigError` for other files."""
        try:
            value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(value, dict) and value.get("format") == BENCH_STEP:
                return cls._of_bench_step(value)
            columns = [value["samples"][field.name] for field in fields(Sample)]
            names = [field.name for field in fields(Sample)]
            samples = tuple(Sample(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True))
            rest = {field.name: value[field.name] for field in fields(cls) if field.name != "samples"}
            found = cls(**(rest | {"flags": tuple(rest["flags"]), "samples": samples}))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"--step-costs: {path} holds no measured steps: {error}. Name a file that is not there, and they are measured."
            ) from error
        if not samples:
            raise ConfigError(f"--step-costs: {path} holds no measured steps.")
        return found

    @classmethod
    def _of_bench_step(cls, value: Mapping[str, Any]) -> Measured:
        """Steps that ran without a service around them; see `headrace.bench.inside.step`."""
        samples = [
            Sample(
                tokens=point["tokens"],
                sampled=point["sampled"],
                context=point["rows"] * (point["context"] + 1),
                attended=point["prompt_tokens"] * (point["context"] + point["prompt_tokens"]),
                has_prefill=point["prompt_tokens"] > 0,
                seconds=milliseconds / 1e3,
            )
            for point in value["points"]
            for milliseconds in point["runner_ms"]
        ]
        engine = value["engine"]
        return cls(
            model=value["model"],
            machine=value["machine"],
            flags=None,
            num_blocks=engine["num_blocks"],
            block_size=engine["block_size"],
            max_model_len=engine["max_model_len"],
            handoff_s=0.0,
            before_s=0.0,
            before_token_s=0.0,
            after_s=0.0,
            samples=tuple(samples),
        )


class FittedCosts:
    """Made by `fit`. `noise`: seed of the ratios that steps are drawn with; None: a step takes what the fit says."""

    def __init__(self, knots: Sequence[int], weights: Sequence[float], ratios: Mapping[_Kind, Sequence[float]], *, noise: int | None = 0) -> None:
        self._knots = tuple(knots)
        self._weights = tuple(weights)  # a constant, a slope from each knot to the next one (from the last on without an end), p, a, b and c
        base = [weights[0]]
        for low, high, slope in zip(knots, knots[1:], weights[1:], strict=False):
            base.append(base[-1] + slope * (high - low))
        self._base = base
        self._ratios = {kind: tuple(values) for kind, values in ratios.items()}
        self._pools: dict[_Kind, tuple[float, ...]] = {}  # ratios that a step of this kind is drawn from
        self._draw = None if noise is None else random.Random(noise)

    def fitted(self, shape: StepShape) -> float:
        knots, weights = self._knots, self._weights
        i = max(0, bisect_left(knots, shape.tokens) - 1)
        base = self._base[i] + weights[1 + i] * (shape.tokens - knots[i])
        base += weights[-4] if shape.has_prefill else 0.0
        return base + weights[-3] * shape.sampled + weights[-2] * shape.context + weights[-1] * shape.attended

    def seconds(self, shape: StepShape) -> float:
        seconds = self.fitted(shape)
        if self._draw is None:
            return seconds
        kind = (shape.has_prefill, max(0, bisect_left(self._knots, shape.tokens) - 1))
        pool = self._pools.get(kind) or self._pool(kind)
        return seconds * pool[int(self._draw.random() * len(pool))]

    def _pool(self, kind: _Kind) -> tuple[float, ...]:
        """The kind's own ratios and, where these are few, those of the next sizes on both sides."""
        has_prefill, place = kind
        found: list[float] = []
        for distance in range(len(self._knots)):
            for other in {place - distance, place + distance}:
                found += self._ratios.get((has_prefill, other), ())
            if len(found) >= LEAST_RATIOS:
                break
        pool = self._pools[kind] = tuple(found) or (1.0,)
        return pool

    def with_noise(self, noise: int | None) -> FittedCosts:
        """The same fit with another seed, or without noise."""
        return FittedCosts(self._knots, self._weights, self._ratios, noise=noise)

    def spread(self) -> dict[str, float]:
        """How far measured steps are from fitted ones: the middle of |ratio - 1|, of steps of decodes and of steps with prompts."""
        found = {}
        for has_prefill, word in ((False, "decode"), (True, "prompt")):
            ratios = [ratio for kind, values in self._ratios.items() if kind[0] == has_prefill for ratio in values]
            found[word] = statistics.median(abs(ratio - 1.0) for ratio in ratios) if ratios else 0.0
        return found


def fit(samples: Sequence[Sample], *, noise: int | None = 0) -> FittedCosts:
    """Raises `ConfigError` where the samples say nothing (fewer than four, or no time passed)."""
    good = [sample for sample in samples if sample.seconds > 0.0 and sample.tokens > 0]
    if len(good) < 4:
        raise ConfigError(f"{len(good)} measured steps are too few to say how long a step takes; measure again for longer.")
    knots = _knots([sample.tokens for sample in good])
    rows = [_features(sample.shape, knots) for sample in good]
    measured = [sample.seconds for sample in good]
    scale = measured
    for _ in range(ROUNDS):
        weights = _non_negative(rows, measured, scale)
        plain = FittedCosts(knots, weights, {}, noise=None)
        scale = [max(LEAST_S, plain.fitted(sample.shape)) for sample in good]
    ratios: dict[_Kind, list[float]] = defaultdict(list)
    for sample, fitted in zip(good, scale, strict=True):
        ratios[sample.has_prefill, max(0, bisect_left(knots, sample.tokens) - 1)].append(sample.seconds / fitted)
    return FittedCosts(knots, weights, ratios, noise=noise)


def _knots(tokens: Sequence[int]) -> list[int]:
    """Those between which there is at least one measured step, so that each slope is known from something."""
    seen = sorted(tokens)
    knots = [seen[0]]
    for knot in KNOTS:
        if knots[-1] < knot < seen[-1] and bisect_left(seen, knot + 1) > bisect_left(seen, knots[-1] + 1):
            knots.append(knot)
    return knots


def _features(shape: StepShape, knots: Sequence[int]) -> list[float]:
    ends = (*knots[1:], None)
    parts = [max(0.0, (shape.tokens if end is None else min(shape.tokens, end)) - knot) for knot, end in zip(knots, ends, strict=True)]
    return [1.0, *parts, float(shape.has_prefill), float(shape.sampled), float(shape.context), float(shape.attended)]


def _non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float], scale: Sequence[float]) -> list[float]:
    """w >= 0 that minimises the sum of ((row w - seconds) / scale)^2, by coordinate descent on the normal equations; columns are scaled to one
    length."""
    import numpy as np

    matrix = np.asarray(rows) / np.asarray(scale)[:, None]
    wanted = np.asarray(seconds) / np.asarray(scale)
    lengths = np.sqrt((matrix * matrix).sum(axis=0))
    lengths[lengths == 0.0] = 1.0
    matrix /= lengths
    gram, right = matrix.T @ matrix, matrix.T @ wanted
    weights = np.zeros(len(right))
    for _ in range(SWEEPS):
        before = weights.copy()
        for i in range(len(right)):
            if gram[i, i] > 0.0:
                weights[i] = max(0.0, weights[i] + (right[i] - gram[i] @ weights) / gram[i, i])
        if np.abs(weights - before).max() < 1e-9:
            break
    return [float(value) for value in weights / lengths]
