"""The waves' arithmetic. A short run is among the tests of compiled steps (tests/acceptance/test_compiled.py), which have packages."""

from __future__ import annotations

import random
from collections import Counter
from types import ModuleType

import pytest

from tests.scripts.load_script import load_script


@pytest.fixture(scope="module")
def recompiles() -> ModuleType:
    return load_script("recompiles")


def test_arguments(recompiles: ModuleType) -> None:
    args, serve = recompiles.parse_arguments(["--duration", "3", "--", "some.gguf", "--max-num-seqs", "2"])
    assert (args.duration, args.clients, serve) == (3.0, 24, ["some.gguf", "--max-num-seqs", "2"])
    assert recompiles.parse_arguments([])[1] == ["--compile", "full", "--max-seq-len-to-capture", "1024"]


def test_sizes_are_spread_over_their_orders(recompiles: ModuleType) -> None:
    waves = recompiles.Waves(None, random.Random(0), most=24, longest=1500, max_token=9)
    seen = Counter(waves._between(1, 1500) for _ in range(4000))
    assert (min(seen), max(seen)) == (1, pytest.approx(1500, abs=30))
    assert sum(count for size, count in seen.items() if size <= 38) == pytest.approx(2000, abs=200), "as many below the root as above"
