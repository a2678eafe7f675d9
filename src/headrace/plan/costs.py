"""How long a step takes, from what is in it: fitted to measured steps, or a roofline (`devices`).

The scheduler has a model of its own (`core.step_time`), six numbers that it learns while it serves. This one is fitted once, to all that was
measured, apart for steps of decodes alone and for steps with prompt tokens, which other kernels compute:

    seconds = base + d(decodes) + p(prompt tokens) + a * first tokens + b * context + c * attended

`d` and `p` rise piecewise linearly: a few rows cost as much as one, as long as the weights are what a step waits for, and many cost what their
products cost. A step that follows none at once takes more, by what rises with the pause before it up to a few tenths of a second, whatever is in it.
All slopes are non-negative (a weighted least squares fit of relative errors). What a step takes beside that, because a real machine pauses, is drawn
from the ratios of measured to fitted time of the measured steps of about its size. Weights are taken from the fit itself and not from the measured
times: else the steps that happened to be fast would count most, and the fit would lie below them all.
"""

from __future__ import annotations

import json
import random
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from headrace.core.step_work import StepWork
from headrace.errors import ConfigError

KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 32768)
BENCH_STEP = "headrace-step-1"
LEAST_STEPS = 4  # of a kind that is fitted for itself
ROUNDS = 6  # of fits, each weighted by the one before
LEAST_RATIOS = 40  # that a step's noise is drawn from
LEAST_S = 1e-9  # no step takes less
IDLE_KNOTS = (0.0, 0.02, 0.1, 0.4)  # seconds without a step; after more than the last the next one is as cold as it gets
SWEEPS = 2000  # of coordinate descent; a dozen features need far fewer
COLUMNS = (*StepWork._fields, "seconds", "idle")  # of samples in a file

_Kind = tuple[bool, int]  # whether it has prompt tokens, and the index of the knot below its size


class Costs(Protocol):
    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step."""

    work: StepWork
    seconds: float
    idle: float = 0.0  # seconds without a step before it


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
        rest = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "samples"}
        columns = dict(zip(COLUMNS, zip(*((*sample.work, sample.seconds, sample.idle) for sample in self.samples), strict=True), strict=False))
        path.write_text(json.dumps({"object": "step_costs", **rest, "samples": columns}) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Measured:
        """What `write` has written, or `headrace bench step --json`. Raises `ConfigError` for other files."""
        try:
            value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(value, dict) and value.get("format") == BENCH_STEP:
                return cls._of_bench_step(value)
            columns = [value["samples"][name] for name in COLUMNS]
            samples = tuple(Sample(StepWork(*work), seconds, idle) for *work, seconds, idle in zip(*columns, strict=True))
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
                StepWork(
                    decode_tokens=point["rows"],
                    decode_attended=point["rows"] * (point["context"] + 1),
                    prompt_tokens=point["prompt_tokens"],
                    prompt_attended=point["prompt_tokens"] * (point["context"] + point["prompt_tokens"]),
                    sampled=point["sampled"],
                ),
                milliseconds / 1e3,
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


class Ramp:
    """Rises piecewise linearly from 0 at the first of `knots`; behind the last one its slope goes on."""

    def __init__(self, knots: Sequence[float], slopes: Sequence[float]) -> None:
        self._knots, self._slopes = tuple(knots), tuple(slopes)
        self._heights = [0.0]
        for low, high, slope in zip(knots, knots[1:], slopes, strict=False):
            self._heights.append(self._heights[-1] + slope * (high - low))

    def __call__(self, count: float) -> float:
        i = max(0, bisect_left(self._knots, count) - 1)
        return self._heights[i] + self._slopes[i] * max(0, count - self._knots[i])

    @staticmethod
    def features(count: float, knots: Sequence[float]) -> list[float]:
        """Which a `Ramp`'s slopes are the weights of."""
        ends = (*knots[1:], None)
        return [max(0.0, (count if end is None else min(count, end)) - knot) for knot, end in zip(knots, ends, strict=True)]


class Line:
    """What steps of one kind take."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        decode_knots = _knots([sample.work.decode_tokens for sample in samples])
        prompt_knots = _knots([sample.work.prompt_tokens for sample in samples])
        rows = [self._features(sample.work, decode_knots, prompt_knots) for sample in samples]
        measured = [sample.seconds for sample in samples]
        scale = measured
        for _ in range(ROUNDS):
            weights = _non_negative(rows, measured, scale)
            middle = 1 + len(decode_knots)
            self._base = weights[0]
            self._decodes, self._prompt = Ramp(decode_knots, weights[1:middle]), Ramp(prompt_knots, weights[middle:-3])
            self._first, self._context, self._attended = weights[-3:]
            scale = [self(sample.work) for sample in samples]

    def __call__(self, work: StepWork) -> float:
        seconds = self._base + self._decodes(work.decode_tokens) + self._prompt(work.prompt_tokens)
        seconds += self._first * (work.sampled - work.decode_tokens) + self._context * work.decode_attended + self._attended * work.prompt_attended
        return max(LEAST_S, seconds)

    @staticmethod
    def _features(work: StepWork, decode_knots: Sequence[int], prompt_knots: Sequence[int]) -> list[float]:
        ramps = [*Ramp.features(work.decode_tokens, decode_knots), *Ramp.features(work.prompt_tokens, prompt_knots)]
        return [1.0, *ramps, float(work.sampled - work.decode_tokens), float(work.decode_attended), float(work.prompt_attended)]


class FittedCosts:
    """Made by `fit`. `lines`: by whether there are prompt tokens; one may be missing. `cold`: of idle seconds. `noise`: seed of the ratios that
    steps are drawn with; None: a step takes what the fit says."""

    def __init__(self, lines: Mapping[bool, Line], cold: Ramp, ratios: Mapping[_Kind, Sequence[float]], *, noise: int | None = 0) -> None:
        self._lines = lines
        self._cold = cold
        self._ratios = {kind: tuple(values) for kind, values in ratios.items()}
        self._pools: dict[_Kind, tuple[float, ...]] = {}  # ratios that a step of this kind is drawn from
        self._draw = None if noise is None else random.Random(noise)

    def fitted(self, work: StepWork) -> float:
        line = self._lines.get(work.prompt_tokens > 0)
        if line is not None:
            return line(work)
        if work.prompt_tokens:  # no such step was measured: as if each of them decoded
            return self._lines[False](StepWork(work.tokens, work.decode_attended + work.prompt_attended, 0, 0, work.tokens))
        return self._lines[True](work)

    def cold(self, idle: float) -> float:
        """Seconds that a step takes more after so many without one: caches hold other things then, and cores have slept."""
        return self._cold(min(idle, IDLE_KNOTS[-1]))

    def seconds(self, work: StepWork) -> float:
        """Of a step that follows another one at once; `cold` comes to that where it doesn't."""
        seconds = self.fitted(work)
        if self._draw is None:
            return seconds
        kind = _kind(work)
        pool = self._pools.get(kind) or self._pool(kind)
        return seconds * pool[int(self._draw.random() * len(pool))]

    def _pool(self, kind: _Kind) -> tuple[float, ...]:
        """The kind's own ratios and, where these are few, those of the next sizes on both sides."""
        has_prefill, place = kind
        found: list[float] = []
        for distance in range(len(KNOTS)):
            for other in {place - distance, place + distance}:
                found += self._ratios.get((has_prefill, other), ())
            if len(found) >= LEAST_RATIOS:
                break
        pool = self._pools[kind] = tuple(found) or (1.0,)
        return pool

    def with_noise(self, noise: int | None) -> FittedCosts:
        """The same fit with another seed, or without noise."""
        return FittedCosts(self._lines, self._cold, self._ratios, noise=noise)

    def spread(self) -> dict[str, float]:
        """How far measured steps are from fitted ones: the middle of |ratio - 1|, of steps of decodes and of steps with prompts."""
        found = {}
        for has_prefill, word in ((False, "decode"), (True, "prompt")):
            ratios = [ratio for kind, values in self._ratios.items() if kind[0] == has_prefill for ratio in values]
            found[word] = statistics.median(abs(ratio - 1.0) for ratio in ratios) if ratios else 0.0
        return found


def fit(samples: Sequence[Sample], *, noise: int | None = 0) -> FittedCosts:
    """Raises `ConfigError` where the samples say nothing (fewer than four of either kind, or no time passed)."""
    good = [sample for sample in samples if sample.seconds > 0.0 and sample.work.tokens > 0]
    warm = [sample for sample in good if not sample.idle]
    kinds = {has_prefill: [sample for sample in warm if (sample.work.prompt_tokens > 0) == has_prefill] for has_prefill in (False, True)}
    kinds = {has_prefill: found for has_prefill, found in kinds.items() if len(found) >= LEAST_STEPS}
    if not kinds:
        raise ConfigError(f"{len(warm)} measured steps are too few to say how long a step takes; measure again for longer.")
    lines = {has_prefill: Line(found) for has_prefill, found in kinds.items()}
    ratios: dict[_Kind, list[float]] = defaultdict(list)
    for has_prefill, found in kinds.items():
        for sample in found:
            ratios[_kind(sample.work)].append(sample.seconds / lines[has_prefill](sample.work))
    return FittedCosts(lines, _cold([sample for sample in good if sample.idle], lines), ratios, noise=noise)


def _cold(samples: Sequence[Sample], lines: Mapping[bool, Line]) -> Ramp:
    """What steps after a pause took beyond their line, by idle seconds; nothing where too few were measured."""
    knots = IDLE_KNOTS[:-1]
    extra = [(sample.idle, sample.seconds - line(sample.work)) for sample in samples if (line := lines.get(sample.work.prompt_tokens > 0))]
    if len(extra) < LEAST_STEPS:
        return Ramp(knots, [0.0] * len(knots))
    features = [Ramp.features(min(idle, IDLE_KNOTS[-1]), knots) for idle, _ in extra]
    return Ramp(knots, _non_negative(features, [seconds for _, seconds in extra], [1.0] * len(extra)))


def _kind(work: StepWork) -> _Kind:
    return (work.prompt_tokens > 0, max(0, bisect_left(KNOTS, work.tokens) - 1))


def _knots(counts: Sequence[int]) -> list[int]:
    """Those between which there is at least one measured step, so that each slope is known from something."""
    seen = sorted(counts)
    knots = [seen[0]]
    for knot in KNOTS:
        if knots[-1] < knot < seen[-1] and bisect_left(seen, knot + 1) > bisect_left(seen, knots[-1] + 1):
            knots.append(knot)
    return knots


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
