"""Static shapes: every step that may come has one, the smallest that holds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runner.buckets import Bucket, decode_buckets, fitting, mixed_buckets


def test_sizes() -> None:
    assert [bucket.num_tokens for bucket in decode_buckets(64)] == [1, 2, 4, 8, 16, 32, 64]
    assert [bucket.num_tokens for bucket in decode_buckets(48)] == [1, 2, 4, 8, 16, 32, 48]
    assert [bucket.num_tokens for bucket in decode_buckets(1)] == [1]
    assert [bucket.num_tokens for bucket in mixed_buckets(64, 2048)] == [64, 256, 1024, 2048]
    assert [bucket.num_rows for bucket in mixed_buckets(96, 300)] == [64, 96, 96]
    assert [bucket.num_tokens for bucket in mixed_buckets(8, 20)] == [20]
    assert [bucket.name for bucket in (*decode_buckets(2), *mixed_buckets(2, 64))] == ["decode-1", "decode-2", "mixed-64"]


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "name"),
    [
        (1, 1, "decode-1"),
        (3, 3, "decode-4"),
        (8, 8, "decode-8"),
        (9, 9, None),
        (9, 8, "mixed-64"),
        (65, 1, "mixed-100"),
        (101, 2, None),
        (20, 9, None),
    ],
)
def test_which_bucket_takes_a_step(num_tokens: int, num_rows: int, name: str | None) -> None:
    buckets = (*decode_buckets(8), *mixed_buckets(8, 100))
    found = fitting(buckets, num_tokens=num_tokens, num_rows=num_rows)
    assert (found and found.name) == name


@given(st.integers(1, 300), st.integers(0, 3000), st.data())
def test_every_step_of_a_service_has_a_bucket_close_to_its_size(max_num_seqs: int, more: int, data: st.DataObject) -> None:
    most = max_num_seqs + more
    buckets = (*decode_buckets(max_num_seqs), *mixed_buckets(max_num_seqs, most))
    rows = data.draw(st.integers(1, max_num_seqs))
    tokens = data.draw(st.integers(rows, most))
    found = fitting(buckets, num_tokens=tokens, num_rows=rows)
    assert found is not None
    assert found.holds(tokens, rows)
    assert found.kind == ("decode" if tokens == rows else "mixed")
    assert found.num_tokens <= (2 * tokens - 1 if found.kind == "decode" else max(4 * tokens, 64))


def test_only_those_that_are_there_are_chosen() -> None:
    small = Bucket(kind="decode", num_tokens=2, num_rows=2)
    large = Bucket(kind="decode", num_tokens=8, num_rows=8)
    assert fitting([large, small], num_tokens=1, num_rows=1) is small
    assert fitting([large], num_tokens=1, num_rows=1) is large
    assert fitting([small], num_tokens=3, num_rows=3) is None
    assert fitting([], num_tokens=1, num_rows=1) is None
