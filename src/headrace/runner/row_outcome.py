"""What became of each row of a step: its new tokens, scores of its prompt, or why it failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.messages import Row, TokenLogprobs
from headrace.runner.sampler import Sampled


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a row: its new token, or log probabilities of its prompt, or an error."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    complete: bool = False  # the grammar allows nothing more
    error: str | None = None


NOTHING = Outcome()


def outcomes_of(rows: Sequence[Row], sampled: Sampled) -> list[Outcome]:
    """What was sampled for each row, up to the first token that is not the guess in its place. An error ends the tokens before it; it is
    the row's where there are none."""
    outcomes = []
    first = 0
    for row in rows:
        count = 0
        for guess in (*row.token_ids[len(row.token_ids) - row.num_speculated :], None):
            if sampled.errors[first + count] is not None:
                break
            count += 1
            if sampled.token_ids[first + count - 1] != guess:
                break
        logprobs = [entry for entry in sampled.logprobs[first : first + count] if entry is not None]
        outcomes.append(
            Outcome(
                token_ids=tuple(sampled.token_ids[first : first + count]),
                logprobs=tuple(logprobs) or None,
                error=None if count else sampled.errors[first],
            )
        )
        first += row.num_speculated + 1
    return outcomes
