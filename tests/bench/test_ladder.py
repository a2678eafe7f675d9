"""The rungs as they are defined, and what is said of their figures."""

from __future__ import annotations

import pytest

from headrace.bench.figures import useful_share
from headrace.bench.ladder import Rung, chosen, joined, rungs, shared_context_figures, shared_context_requests, table, with_ratios
from headrace.bench.load import Run
from headrace.bench.sse_client import Record
from headrace.cli.main import build_parser
from tests.bench.results import rung

COMMON = ("--dtype", "float32", "--device", "cpu")


def ladder(quantization: str | None = "gguf") -> dict[str, Rung]:
    return {rung.name: rung for rung in rungs(common=COMMON, clients=8, quantization=quantization)}


def test_the_rungs_and_what_they_stand_on():
    found = ladder()
    assert {name: rung.base for name, rung in found.items()} == {
        "naive": None,
        "dynamic": "naive",
        "dynamic-reuse": "dynamic",
        "continuous": "dynamic",
        "prefix-cache": "continuous",
        "quantized": "prefix-cache",
    }
    for name, one in found.items():
        assert one.base is None or list(found).index(one.base) < list(found).index(name)
    assert "quantized" not in ladder(None)


def test_each_rung_switches_one_thing():
    def pairs(rung: Rung) -> set[tuple[str, ...]]:
        """Flags with their values."""
        starts = [i for i, word in enumerate(rung.flags) if word.startswith("--")]
        return {tuple(rung.flags[a:b]) for a, b in zip(starts, [*starts[1:], len(rung.flags)], strict=True)}

    found = ladder()

    def switched(name: str) -> set[tuple[str, ...]]:
        base = found[str(found[name].base)]
        return pairs(found[name]) ^ pairs(base)

    assert switched("dynamic") == {("--max-batch", "8"), ("--window-ms", "20")}
    assert switched("dynamic-reuse") == {("--kept-tokens", "8192")}
    # another server: as many rows, and no prefix cache, which the rung below has not either
    assert switched("continuous") == {("--max-batch", "8"), ("--window-ms", "20"), ("--max-num-seqs", "8"), ("--no-enable-prefix-caching",)}
    assert switched("prefix-cache") == {("--no-enable-prefix-caching",)}
    assert switched("quantized") == {("--quantization", "none"), ("--quantization", "gguf")}


def test_flags_of_headrace_are_known_to_it():
    for one in ladder().values():
        if one.server == "headrace":
            build_parser().parse_args(["serve", "model.gguf", *one.flags, "--port", "1"])


def test_rungs_are_chosen_by_name():
    available = rungs(common=COMMON, clients=8, quantization=None)
    assert [rung.name for rung in chosen(available, ["continuous", "naive"])] == ["naive", "continuous"]
    with pytest.raises(ValueError, match="no rung quantized here; use naive, dynamic"):
        chosen(available, ["quantized"])


def test_prompts_share_their_context():
    requests = shared_context_requests(3, words=50, seed=1)
    words = [request.prompt.split() for request in requests]
    assert len({tuple(prompt[:50]) for prompt in words}) == 1
    assert len({tuple(prompt[50:]) for prompt in words}) == 3


def test_the_first_of_them_is_apart():
    def record(seconds: float) -> Record:
        return Record(sent=1.0, first=1.0 + seconds, last=9.0, num_prompt_tokens=66, num_output_tokens=2)

    found = shared_context_figures(Run(records=tuple(record(s) for s in (4.0, 0.2, 0.6, 0.4)), seconds=9.0))
    assert (found["prompt_tokens"], found["errors"]) == (66, [])
    assert found["first_ttft_ms"] == pytest.approx(4000.0)
    assert found["median_ttft_ms"] == pytest.approx(400.0)
    failed = shared_context_figures(Run(records=(Record(sent=0.0, error="too long"),), seconds=1.0))
    assert (failed["first_ttft_ms"], failed["median_ttft_ms"], failed["errors"]) == (None, None, ["too long"])


def test_gains_are_over_the_base_and_over_the_lowest():
    results = with_ratios(
        [
            rung("naive", None, throughput=0.5, shared_ms=4000.0),
            rung("dynamic", "naive", throughput=1.5, shared_ms=4000.0),
            rung("continuous", "dynamic", throughput=2.0, shared_ms=None, work=False),
        ]
    )
    naive, dynamic, continuous = results
    assert naive["over_base"] == {"request_throughput": None, "shared_ttft": None}
    assert dynamic["over_base"] == {"request_throughput": 3.0, "shared_ttft": 1.0}
    assert continuous["over_base"] == {"request_throughput": pytest.approx(4 / 3), "shared_ttft": None}
    assert continuous["over_lowest"]["request_throughput"] == 4.0
    lines = table(results).splitlines()
    assert lines[1].split()[-1] == "3"
    assert lines[3].split()[-2:] == ["-", "-"], "what is not known is not made up"
    assert "  2. the <dynamic>: against 1. the <naive>: dynamic & more" in lines


def test_rounds_are_joined_by_their_medians():
    """One round of the three was disturbed: what is said is what the two others say, and the spread tells of it."""
    joint = joined([rung("naive", None, throughput=rate, shared_ms=time) for rate, time in ((2.0, 100.0), (0.5, 900.0), (2.2, 110.0))])
    assert (joint["figures"]["request_throughput"], joint["shared_context"]["median_ttft_ms"], joint["spread"]) == (2.0, 110.0, pytest.approx(0.85))
    assert joint["figures"]["completed"] == 3 * rung("naive", None, throughput=1.0, shared_ms=1.0)["figures"]["completed"]
    assert (joint["work"]["useful"], joint["useful_share"], joint["peak_memory_bytes"]) == (9.0, 0.75, 3 << 20)
    assert joined([rung("naive", None, throughput=1.0, shared_ms=1.0)])["spread"] is None
    silent = joined([rung("naive", None, throughput=1.0, shared_ms=None, work=False)] * 2)
    assert (silent["shared_context"]["median_ttft_ms"], silent["work"], silent["useful_share"], silent["peak_memory_bytes"]) == (None,) * 4


def test_a_ratio_is_the_median_of_those_of_the_rounds():
    """Both were slow in the same round: no ratio knows of it."""
    naive = joined([rung("naive", None, throughput=rate, shared_ms=10.0) for rate in (1.0, 0.2, 1.1)])
    dynamic = joined([rung("dynamic", "naive", throughput=rate, shared_ms=5.0) for rate in (3.0, 0.6, 3.3)])
    _, found = with_ratios([naive, dynamic])
    assert found["over_base"] == {"request_throughput": pytest.approx(3.0), "shared_ttft": 2.0}


def test_a_base_that_did_not_run_gives_no_ratio():
    (alone,) = with_ratios([rung("continuous", "dynamic", throughput=2.0, shared_ms=1.0)])
    assert alone["over_base"]["request_throughput"] is None
    assert "against" not in table([alone])


def test_the_useful_share_is_of_busy_time():
    assert useful_share({"useful": 3.0, "host": 1.0, "idle": 10.0, "waiting": 5.0}) == 0.75
    assert useful_share({"useful": 0.0, "idle": 1.0}) is None
    assert useful_share(None) is None
