import logging
from dataclasses import dataclass, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.observe.metrics import FINISH_REASONS, Metrics


@dataclass(frozen=True)
class Snapshot:
    num_running: int = 3
    num_waiting: int = 2
    num_swapped: int = 1
    num_blocks: int = 10
    num_free_blocks: int = 4
    num_cached_blocks: int = 5
    prefix_query_tokens_total: int = 100
    prefix_hit_tokens_total: int = 40
    prefix_miss_new_tokens_total: int = 30
    prefix_miss_evicted_tokens_total: int = 20
    prefix_miss_other_salt_tokens_total: int = 6
    prefix_miss_partial_tokens_total: int = 4
    kv_sampled_positions_total: int = 50
    kv_unused_positions_total: int = 10
    preemptions_recompute_total: int = 2
    preemptions_swap_total: int = 1
    recomputed_tokens_total: int = 7
    spec_drafts_total: int = 4
    spec_draft_tokens_total: int = 12
    spec_accepted_tokens_total: int = 8
    spec_rejected_tokens_total: int = 4


def samples(metrics: Metrics, stats: Snapshot | None = None, state: str = "ready", restarts: int = 0) -> dict[str, float]:
    """'name{labels}' -> value, without the model's label."""
    text = metrics.render(stats, state=state, restarts=restarts)[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name")
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found
            found[name] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics(model_name='a"\\\nb')
    metrics.expect_paths(["/a"])
    return metrics


def test_both_names_have_the_same_values(metrics: Metrics):
    metrics.prompt(5)
    metrics.first_token(0.2)
    metrics.more_tokens(0.1, 2)
    metrics.finished("stop", 0.5, 3)
    found = samples(metrics, Snapshot())
    ours = {name.removeprefix("headrace_"): value for name, value in found.items() if name.startswith("headrace_")}
    theirs = {name.removeprefix("vllm:"): value for name, value in found.items() if name.startswith("vllm:")}
    assert theirs.items() <= ours.items()
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "num_requests_swapped": 1,
        "kv_cache_usage_perc": 0.6,
        "prompt_tokens_total": 5,
        "generation_tokens_total": 3,
        "num_preemptions_total": 3,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
        "spec_decode_num_drafts_total": 4,
        "spec_decode_num_draft_tokens_total": 12,
        "spec_decode_num_accepted_tokens_total": 8,
        "spec_decode_num_rejected_tokens_total": 4,
        "request_success_total{finished_reason=stop}": 1,
        "request_success_total{finished_reason=length}": 0,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.2,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_sum": 0.1,
        "e2e_request_latency_seconds_count": 1,
        "request_prompt_tokens_sum": 5,
        "request_generation_tokens_sum": 3,
    }
    assert {name: theirs[name] for name in expected} == pytest.approx(expected)


def test_every_series_is_there_from_the_start(metrics: Metrics):
    before = set(samples(metrics))
    for reason in (*FINISH_REASONS, "made up"):
        metrics.finished(reason, 1, 1)
    for status in (0, 200, 204, 307, 404, 503, 999):
        metrics.http_request("/a", status)
        metrics.http_request("other", status)
    metrics.prompt(1)
    assert set(samples(metrics, Snapshot(), restarts=1)) == before
    assert not any("_created" in name for name in before)


def test_counters_never_fall(metrics: Metrics):
    first = Snapshot()
    assert samples(metrics, first, restarts=2)["headrace_num_preemptions_total"] == 3
    found = samples(metrics, replace(first, preemptions_recompute_total=0, prefix_hit_tokens_total=1, num_running=0), restarts=1)
    assert found["headrace_num_preemptions_total"] == 3
    assert found["headrace_prefix_cache_hits_total"] == 40
    assert found["headrace_engine_restarts_total"] == 2
    assert found["headrace_num_requests_running"] == 0


def test_a_fault_is_logged_once_counted_and_raises_nothing(metrics: Metrics, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        metrics.prompt(-5)
        metrics.generated(-1)
        metrics.first_token("soon")  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    assert metrics.faults == 3
    found = samples(metrics)
    assert found["headrace_metrics_faults"] == 3
    assert found["headrace_prompt_tokens_total"] == found["headrace_generation_tokens_total"] == 0


def test_a_clock_that_goes_back_gives_no_negative_latency(metrics: Metrics):
    metrics.first_token(-1)
    metrics.more_tokens(-1, 2)
    metrics.finished("length", -1, 2)
    found = samples(metrics)
    assert metrics.faults == 0
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert found[f"headrace_{name}_seconds_sum"] == 0


def test_without_a_snapshot_there_are_metrics_all_the_same(metrics: Metrics):
    found = samples(metrics, None, state="starting")
    assert found["headrace_ready"] == 0
    assert samples(metrics, Snapshot(num_blocks=0, num_free_blocks=0))["headrace_kv_cache_usage_perc"] == 0
    assert samples(metrics, Snapshot())["headrace_ready"] == 1
