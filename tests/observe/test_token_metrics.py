from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from headrace.observe.metrics import SHORT_SECONDS
from headrace.observe.token_metrics import TokenMetrics


def test_it_tells_what_the_librarys_own_metrics_tell() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tokens = TokenMetrics("tiny", SHORT_SECONDS)
    ours.register(tokens)
    counter = Counter("generation_tokens", "Tokens generated.", ("model_name",), registry=theirs).labels("tiny")
    histogram = Histogram(
        "inter_token_latency_seconds", "Between successive tokens of a choice.", ("model_name",), registry=theirs, buckets=SHORT_SECONDS
    ).labels("tiny")
    draw = random.Random(0)
    for seconds in [0.0, 0.001, 0.1, 80.0, 81.0, *(draw.lognormvariate(-3.0, 2.0) for _ in range(200))]:
        count = draw.choice((1, 1, 3))
        tokens.generated(1)
        tokens.more(seconds, count)
        counter.inc(1 + count)
        for _ in range(count):
            histogram.observe(seconds / count)

    def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        found = [sample for metric in registry.collect() for sample in metric.samples if not sample.name.endswith("_created")]
        return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}

    assert samples(ours) == pytest.approx(samples(theirs))


def test_the_counter_never_falls() -> None:
    with pytest.raises(ValueError, match="-1"):
        TokenMetrics("tiny", SHORT_SECONDS).generated(-1)
