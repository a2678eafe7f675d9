"""Results as the verbs have them, made up."""

from __future__ import annotations

from typing import Any

from headrace.bench.figures import figures
from headrace.bench.load import Run
from headrace.bench.sse_client import Record
from headrace.observe.work import KINDS

PROVENANCE = {
    "date": "20260102-030405",
    "command": "headrace bench <ladder> & more",
    "machine": "A <processor>, 2 CPUs",
    "headrace_version": "1",
    "torch_version": "2",
    "python_version": "3",
}


def run_of(count: int = 4, *, seconds: float = 2.0, error: str | None = None) -> Run:
    """Requests that take a second each, a tenth until the first token."""
    good = [Record(sent=0.0, first=0.1 + i / 100, last=1.0, gaps=[0.45, 0.45], num_prompt_tokens=7, num_output_tokens=3) for i in range(count)]
    return Run(records=(*good, *([Record(sent=0.0, error=error)] if error else [])), seconds=seconds)


def served(rate: float, *, url: str = "http://a", throughput: float | None = None, error: str | None = None, work: bool = False) -> dict[str, Any]:
    """What `headrace bench serve` keeps of a run."""
    found = figures(run_of(error=error), percentiles=(50, 95, 99))
    found |= {"request_throughput": throughput or found["request_throughput"]}
    split = dict.fromkeys(KINDS, 0.0) | {"useful": 3.0, "padding": 1.0, "idle": 6.0} if work else None
    head = {"base_url": url, "model_id": "m<1>", "num_prompts": 5, "request_rate": rate, "max_concurrency": None, "work_seconds": split}
    return PROVENANCE | head | found


def rung(name: str, base: str | None, *, throughput: float, shared_ms: float | None, work: bool = True) -> dict[str, Any]:
    """What `headrace bench ladder` measures of a rung."""
    found = figures(run_of(), percentiles=(50, 95, 99)) | {"request_throughput": throughput}
    split = dict.fromkeys(KINDS, 0.0) | {"useful": 3.0, "padding": 1.0, "idle": 6.0}
    return {
        "name": name,
        "title": f"the <{name}>",
        "base": base,
        "words": f"{name} & more",
        "command": f"python -m {name}",
        "start_seconds": 1.0,
        "figures": found,
        "shared_context": {"prompt_tokens": 2016, "first_ttft_ms": shared_ms, "median_ttft_ms": shared_ms, "ttfts_ms": [], "errors": []},
        "work": split if work else None,
        "useful_share": 0.75 if work else None,
        "peak_memory_bytes": 3 << 20 if work else None,
        "rounds": [{"request_throughput": throughput, "shared_ttft_ms": shared_ms}],
        "spread": 0.0,
    }
