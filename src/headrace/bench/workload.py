"""What is asked, and when: prompts of random words with drawn lengths, and the moments of their arrival."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError

# short, common words: one token each in most vocabularies; what a prompt really had is in the answer's usage
_WORDS = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by but some what there we can out
other were all your when up use word how said an each she which do their time if will way about many then them would write like so these
her long make thing see him two has look more day could go come did my sound no most number who over know water than call first people
may down side been now find
"""

WORDS = tuple(_WORDS.split())

VARIED_SIGMA, VARIED_MOST = 0.8, 4.0

RampUp = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    prompt: str
    max_tokens: int


def random_requests(
    count: int, *, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0
) -> list[BenchRequest]:
    """Prompts of about `input_len` tokens behind `prefix_len` that all share; lengths are uniform within `range_ratio` of theirs, on both sides."""
    if not 0.0 <= range_ratio < 1.0:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, not {range_ratio}.")
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, draw.randint(round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))))

    prefix = _words(draw, prefix_len)
    return [BenchRequest(prompt=" ".join([*prefix, *_words(draw, length(input_len))]), max_tokens=length(output_len)) for _ in range(count)]


def varied_requests(count: int, *, input_len: int, output_len: int, seed: int = 0) -> list[BenchRequest]:
    """Prompts and answers whose lengths are lognormal around these medians, as those of chats are: most are short and a few many times as long.

    The standard deviation of the logarithm is 0.8; lengths are kept between a quarter and four times their median.
    """
    draw = random.Random(seed)

    def length(median: int) -> int:
        return round(median * min(VARIED_MOST, max(1 / VARIED_MOST, draw.lognormvariate(0.0, VARIED_SIGMA)))) or 1

    return [BenchRequest(prompt=" ".join(_words(draw, length(input_len))), max_tokens=length(output_len)) for _ in range(count)]


def _words(draw: random.Random, count: int) -> list[str]:
    return draw.choices(WORDS, k=count)


def read_requests(path: Path, *, output_len: int) -> list[BenchRequest]:
    """One JSON object a line: `prompt`, and `output_tokens` (or `max_tokens`) where it has its own length. Raises `ConfigError`."""
    requests = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path: cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt, tokens = value["prompt"], value.get("output_tokens", value.get("max_tokens", output_len))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}:{number}: each line must be a JSON object with a prompt.") from error
        if not isinstance(prompt, str) or not prompt or isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ConfigError(f"{path}:{number}: prompt must be a text, output_tokens a whole number of at least 1.")
        requests.append(BenchRequest(prompt=prompt, max_tokens=tokens))
    if not requests:
        raise ConfigError(f"{path} holds no request.")
    return requests


def arrivals(
    count: int, *, rate: float, burstiness: float = 1.0, seed: int = 0, ramp_up: RampUp | None = None, start_rate: float = 0.0, end_rate: float = 0.0
) -> list[float]:
    """Seconds after the start at which each request is sent. `rate`: requests a second; infinity: all at once.

    The gaps are gamma distributed with shape `burstiness` (1: a Poisson process; below: bursts; above: more even), as `vllm bench serve` draws
    them. With `ramp_up` the rate goes from `start_rate` to `end_rate` over the requests.
    """
    draw = random.Random(seed)
    gaps = (_gap(draw, _rate_at(i / max(count - 1, 1), rate, ramp_up, start_rate, end_rate), burstiness) for i in range(count))
    return list(itertools.accumulate(itertools.chain([0.0], itertools.islice(gaps, 1, None))))[:count]


def _gap(draw: random.Random, rate: float, burstiness: float) -> float:
    return 0.0 if rate == float("inf") else draw.gammavariate(burstiness, 1.0 / (rate * burstiness))


def _rate_at(share: float, rate: float, ramp_up: RampUp | None, start: float, end: float) -> float:
    match ramp_up:
        case "linear":
            return start + (end - start) * share
        case "exponential":
            return start * float(end / start) ** share
        case None:
            return rate


def repeated(requests: list[BenchRequest], count: int) -> Iterator[BenchRequest]:
    """So many requests: the given ones, again from the first where they do not suffice."""
    return itertools.islice(itertools.cycle(requests), count)
