"""The static shapes that steps are filled up to.

A decode bucket holds steps in which every row computes one token, a mixed bucket any others: prompts, chunks of prompts, and decode rows
beside them. Decode buckets grow by factors of two, so that at most half of a step is padding; mixed ones by four, for their steps are longer and
each costs the compiler as much. The kernels pass over padding, so it costs little where a layer is nothing but kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SMALLEST_MIXED = 64  # tokens; below, the work of a step is that of its rows

Kind = Literal["decode", "mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    kind: Kind
    num_tokens: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.num_tokens}"

    def holds(self, num_tokens: int, num_rows: int) -> bool:
        """Whether a step of this size fits. A decode bucket wants one token a row."""
        return num_tokens <= self.num_tokens and num_rows <= self.num_rows and (self.kind == "mixed" or num_tokens == num_rows)


def decode_buckets(max_num_seqs: int) -> tuple[Bucket, ...]:
    """1, 2, 4, ... rows; the largest holds `max_num_seqs`."""
    return tuple(Bucket(kind="decode", num_tokens=size, num_rows=size) for size in _sizes(1, max_num_seqs, factor=2))


def mixed_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """Chunks of 64, 256, ... tokens; the largest holds `max_num_batched_tokens`. Each has room for the rows of every running request."""
    smallest = min(SMALLEST_MIXED, max_num_batched_tokens)
    return tuple(
        Bucket(kind="mixed", num_tokens=size, num_rows=min(size, max_num_seqs)) for size in _sizes(smallest, max_num_batched_tokens, factor=4)
    )


def fitting(buckets: Sequence[Bucket], *, num_tokens: int, num_rows: int) -> Bucket | None:
    """The smallest bucket of `buckets` for a step: of decode rows only one of their kind; None where the step is too large."""
    kind = "decode" if num_tokens == num_rows else "mixed"
    found = (bucket for bucket in buckets if bucket.kind == kind and bucket.holds(num_tokens, num_rows))
    return min(found, key=lambda bucket: bucket.num_tokens, default=None)


def _sizes(first: int, last: int, *, factor: int) -> list[int]:
    """Powers of `factor` times `first` below `last`, and `last`."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * factor, last))
    return sizes
