"""What a running server says of itself, read critically."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.doctor.finding import Finding, fault, well

MISSED_SHARE = 0.2  # of the steps, on the ready path although compiled ones serve
MIN_STEPS = 200  # of fewer nothing is said
PREEMPTED_SHARE = 0.02  # preemptions for each first token
MIN_LOOKED_UP = 10_000  # prompt tokens; of fewer nothing is said
EVICTED_SHARE, OTHER_SALT_SHARE = 0.1, 0.1  # of the prompt tokens looked up
MIN_SAMPLED = 20_000  # positions of KV blocks
UNUSED_SHARE = 0.3  # of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    status: Mapping[str, Any]  # GET /v1/status
    ready: Mapping[str, Any]  # GET /ready
    metrics: Mapping[str, float]  # GET /metrics, by name with its labels as they are written there

    @property
    def engine(self) -> Mapping[str, Any]:
        """Empty before the engine has computed anything."""
        return self.status.get("engine") or {}

    def metric(self, name: str) -> float:
        return self.metrics.get(name, 0.0)


def parse_metrics(text: str) -> dict[str, float]:
    """The samples of an exposition in Prometheus' text format."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def readiness(facts: ServerFacts) -> Finding:
    state = facts.status.get("state")
    if state != "ready":
        return fault("ready", f"the server is {state}", "look into its log")
    return well("ready", "the server answers")


def restarts(facts: ServerFacts) -> Finding:
    count = facts.status.get("engine_restarts_total", 0)
    if count:
        return fault(
            "restarts",
            f"the engine was started again {count} times",
            "look into the log for why it died: most often memory, or a step that was stuck",
        )
    return well("restarts", "the engine never died")


def kernels(facts: ServerFacts) -> Finding:
    path = str(facts.ready.get("path", ""))
    if "no CPU kernels" in path:
        return fault(
            "kernels",
            f"it serves by {path}",
            "install g++ or serve with --artifacts; the log of the start says what is missing",
            "several times the speed",
        )
    return well("kernels", path or "not told")


def compiled_paths(facts: ServerFacts) -> Finding:
    paths = (facts.ready.get("compile") or {}).get("paths", [])
    failed = [path for path in paths if path["state"] == "failed"]
    if failed:
        reasons = "; ".join(f"{path['name']}: {path['reason']}" for path in failed[:3])
        return fault(
            "compiled-paths",
            f"{len(failed)} of {len(paths)} compiled paths failed ({reasons})",
            "mend the reason, or serve with --compile off to be rid of the attempt",
        )
    return well("compiled-paths", f"{sum(path['state'] == 'compiled' for path in paths)} compiled paths serve")


def recompiles(facts: ServerFacts) -> Finding:
    count = facts.metric("headrace_recompiles_total")
    if count:
        return fault(
            "recompiles",
            f"{count:.0f} compilations beyond the first of a path",
            "serve with --artifacts, and tell us: there should be none after warm-up",
        )
    return well("recompiles", "none")


def bucket_misses(facts: ServerFacts) -> Finding:
    compiled, general = facts.metric('headrace_steps_total{path="compiled"}'), facts.metric('headrace_steps_total{path="ready"}')
    if not compiled or compiled + general < MIN_STEPS or general / (compiled + general) < MISSED_SHARE:
        return well("bucket-misses", f"{compiled:.0f} steps compiled, {general:.0f} on the ready path")
    return fault(
        "bucket-misses",
        f"{general / (compiled + general):.0%} of {compiled + general:.0f} steps took the ready path: they fit no compiled one, "
        "or ran before those were there",
        "prepare for what comes: `headrace compile` with the same --max-num-seqs, --max-num-batched-tokens and a longer static length",
    )


def preemptions(facts: ServerFacts) -> Finding:
    count, answers = facts.engine.get("preemptions_total", 0), facts.status.get("first_tokens_total", 0)
    if count > PREEMPTED_SHARE * max(answers, 1) and count >= 5:
        again = facts.engine.get("recomputed_tokens_total", 0)
        return fault(
            "preemptions",
            f"{count} preemptions over {answers} answers; {again} tokens were computed again",
            "raise --kv-memory, or lower --max-num-seqs so that fewer share it",
        )
    return well("preemptions", f"{count} over {answers} answers")


def kv_blocks(facts: ServerFacts) -> Finding:
    blocks, waiting = facts.engine.get("kv_blocks"), facts.engine.get("waiting", 0)
    if not blocks:
        return well("kv-blocks", "nothing was computed yet")
    if waiting and blocks["used"] > 0.95 * blocks["total"]:
        return fault(
            "kv-blocks",
            f"{blocks['used']} of {blocks['total']} blocks are held while {waiting} requests wait",
            "raise --kv-memory, or use --kv-cache-dtype float16",
        )
    return well("kv-blocks", f"{blocks['used']} of {blocks['total']} held")


def _misses(facts: ServerFacts) -> dict[str, float]:
    """Prompt tokens by what became of them in the prefix cache."""
    misses = {
        cause: facts.metric(f'headrace_prefix_cache_miss_tokens_total{{cause="{cause}"}}') for cause in ("new", "evicted", "other_salt", "partial")
    }
    return misses | {"hits": sum(value for name, value in facts.metrics.items() if name.startswith("headrace_prefix_cache_hits_total"))}


def prefix_cache(facts: ServerFacts) -> Finding:
    found = _misses(facts)
    total = sum(found.values())
    if total < MIN_LOOKED_UP:
        return well("prefix-cache", f"{total:.0f} prompt tokens were looked up, too few to say anything")
    shares = {name: value / total for name, value in found.items()}
    words = {"hits": "found", "new": "new", "evicted": "evicted", "other_salt": "under another salt"}
    evidence = f"of {total:.0f} prompt tokens " + ", ".join(f"{shares[name]:.0%} {word}" for name, word in words.items())
    if shares["other_salt"] >= OTHER_SALT_SHARE:
        return fault(
            "prefix-cache",
            evidence,
            "send the same cache_salt with all requests that may share their prompts: one for a tenant, not one for a request",
            f"up to {shares['other_salt']:.0%} of all prompt tokens need no computing",
        )
    if shares["evicted"] >= EVICTED_SHARE:
        return fault(
            "prefix-cache",
            evidence,
            "raise --kv-memory, or let conversations send a session_id, whose blocks are kept ahead of others",
            f"up to {shares['evicted']:.0%} of all prompt tokens need no computing",
        )
    return well("prefix-cache", evidence)


def kv_fragmentation(facts: ServerFacts) -> Finding:
    used, unused = (facts.metric(f'headrace_kv_cache_positions_total{{content="{content}"}}') for content in ("token", "nothing"))
    share = unused / (used + unused) if used + unused else 0.0
    evidence = f"{share:.0%} of the positions in held blocks hold no token"
    if used + unused < MIN_SAMPLED or share < UNUSED_SHARE:
        return well("kv-fragmentation", evidence)
    return fault(
        "kv-fragmentation",
        f"{evidence}: requests are short for their blocks",
        "serve with a smaller --block-size",
        f"up to {share / (1 - share):.0%} more requests in the same memory",
    )


CHECKS: tuple[Callable[[ServerFacts], Finding], ...] = (
    readiness,
    restarts,
    kernels,
    compiled_paths,
    recompiles,
    bucket_misses,
    preemptions,
    kv_blocks,
    kv_fragmentation,
    prefix_cache,
)


def time_findings(facts: ServerFacts) -> list[Finding]:
    """What the server itself remarks on where its time went; see `observe.remarks`."""
    found = [
        fault(f"time-{remark['kind']}", remark["text"], "see docs/where-time-goes.md", f"up to {remark['share']:.0%} of the time")
        for remark in facts.engine.get("remarks", [])
    ]
    return found or [well("time", "nothing is out of proportion")]
