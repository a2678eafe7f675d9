"""What is wrong with a division of time, in words: a busy device that does little that anybody asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from headrace.observe.work import KINDS, Work

MIN_BUSY_SECONDS = 1.0  # of less nothing is said


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    kind: str  # of time, see `observe.work`
    share: float  # of the time that it is compared with, from 0 to 1
    text: str  # what was seen, and what helps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    kind: str
    above: float  # share from which on something is said
    of: str
    text: Callable[[Work], str]


def remarks(work: Work) -> list[Remark]:
    """The worst first. Shares are of the busy time, that is of all steps and the work between them, waiting of all time with requests."""
    seconds = work.seconds
    busy = sum(seconds[kind] for kind in KINDS if kind not in ("waiting", "idle"))
    if busy < MIN_BUSY_SECONDS:
        return []
    found = []
    for rule in _RULES:
        share = seconds[rule.kind] / (busy + (seconds["waiting"] if rule.kind == "waiting" else 0.0))
        if share >= rule.above:
            found.append(Remark(kind=rule.kind, share=share, text=f"{share:.0%} of {rule.of} {rule.text(work)}"))
    return sorted(found, key=lambda remark: remark.share, reverse=True)


def _padding(work: Work) -> str:
    name, path = max(work.paths.items(), key=lambda item: item[1].seconds["padding"])
    mean = sum(count for kind, count in path.tokens.items() if kind != "padding") / path.steps
    places = sum(path.tokens.values()) / path.steps
    return f"is padding: {name} runs with {mean:.1f} of its {places:.0f} places; steps of {math.ceil(mean)} would do."


_RULES = (
    _Rule(kind="padding", above=0.05, of="busy time", text=_padding),
    _Rule(
        kind="recompute",
        above=0.03,
        of="busy time",
        text=lambda _: "computes tokens again whose blocks were taken away: give more --kv-memory, or let fewer run at once (--max-num-seqs).",
    ),
    _Rule(
        kind="speculation",
        above=0.1,
        of="busy time",
        text=lambda _: "goes into guesses that were wrong: fewer num_speculative_tokens, a longer prompt_lookup_min, or no --speculative-config.",
    ),
    _Rule(
        kind="discarded",
        above=0.05,
        of="busy time",
        text=lambda _: "computes tokens of requests that have ended: clients hang up, answers are very short, or steps fail (see the log).",
    ),
    _Rule(
        kind="host",
        above=0.2,
        of="busy time",
        text=lambda _: "is work around the model: a larger batch shares it; structured output, logprobs and many small requests raise it.",
    ),
    _Rule(kind="compile", above=0.01, of="busy time", text=lambda _: "is compilation inside of steps: `headrace compile` prepares them."),
    _Rule(
        kind="waiting",
        above=0.05,
        of="the time with requests",
        text=lambda _: "passes with requests that wait and none that runs: grammars are compiled, or there is no room (--kv-memory).",
    ),
)
