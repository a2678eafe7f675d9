"""Traces: when requests come and how long they are. Our JSONL, the columns of the Azure and BurstGPT traces, and made-up ones.

JSONL has one object a line: `arrival` (seconds, from any origin), `prompt_tokens`, `output_tokens`, and where it has them `prefix` (a name;
requests of one name begin with the same tokens), `prefix_tokens` (how many of the prompt's) and `tenant`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.bench.workload import WORDS, BenchRequest, arrivals
from headrace.errors import ConfigError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
MOST_TOKENS = 10_000_000  # of a prompt or an answer: more is a wrong column


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    arrival: float  # seconds from the first request of the trace
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: str | None = None  # requests of one name begin with the same tokens,
    num_prefix_tokens: int = 0  # so many
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    name: str
    requests: tuple[TracedRequest, ...]  # by arrival; the first comes at 0
    num_left_out: int = 0  # lines without an answer (a failed request of the traced service)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival

    def first(self, count: int | None) -> Trace:
        return self if count is None else dataclasses.replace(self, requests=self.requests[:count])

    def faster(self, factor: float) -> Trace:
        """The same requests with `factor` times the rate."""
        requests = (dataclasses.replace(request, arrival=request.arrival / factor) for request in self.requests)
        return dataclasses.replace(self, requests=tuple(requests))


def load_trace(text: str) -> Trace:
    """A file, or a made-up trace: `poisson:rate=4,prompt=128,output=64` (see `made_up`). Raises `ConfigError`, which names the line or the key."""
    kind, colon, rest = text.partition(":")
    if colon and kind in ("poisson", "burst") and not Path(text).exists():
        return made_up(kind, rest)
    path = Path(text)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            requests = list(_read_jsonl(file, path) if head.lstrip().startswith("{") else _read_csv(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: cannot read {text}: {error}. Give a file, or poisson:rate=4,prompt=128,output=64.") from error
    answered = [request for request in requests if request.num_output_tokens]
    if not answered:
        raise ConfigError(f"--trace: {path} holds no request with an answer.")
    begin = min(request.arrival for request in answered)
    shifted = (dataclasses.replace(request, arrival=request.arrival - begin) for request in answered)
    return Trace(name=path.name, requests=tuple(sorted(shifted, key=lambda request: request.arrival)), num_left_out=len(requests) - len(answered))


def _read_jsonl(lines: Iterable[str], path: Path) -> Iterable[TracedRequest]:
    fields = ("arrival", "prompt_tokens", "output_tokens", "prefix", "prefix_tokens", "tenant")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"--trace: {path}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON object.") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is no JSON object.")
        if unknown := sorted(set(value) - set(fields)):
            raise ConfigError(f"{where} has an unknown field {unknown[0]!r}; use {', '.join(fields)}.")
        prompt = _count(value.get("prompt_tokens"), where, "prompt_tokens", least=1)
        shared = _count(value.get("prefix_tokens", 0), where, "prefix_tokens")
        prefix, tenant = value.get("prefix"), value.get("tenant", "")
        if (prefix is not None and not isinstance(prefix, str)) or not isinstance(tenant, str):
            raise ConfigError(f"{where}: prefix and tenant must be texts.")
        if shared > prompt or bool(shared) != (prefix is not None):
            raise ConfigError(f"{where}: prefix and prefix_tokens go together, and prefix_tokens is at most prompt_tokens.")
        yield TracedRequest(
            arrival=_time(value.get("arrival"), where, "arrival"),
            num_prompt_tokens=prompt,
            num_output_tokens=_count(value.get("output_tokens"), where, "output_tokens"),
            prefix=prefix,
            num_prefix_tokens=shared,
            tenant=tenant,
        )


def _read_csv(lines: Iterable[str], path: Path) -> Iterable[TracedRequest]:
    rows = csv.DictReader(lines)
    columns = rows.fieldnames or ()
    for names, moment in ((AZURE, _date), (BURSTGPT, _time)):
        if set(names) <= set(columns):
            yield from _columns(rows, path, names, moment)
            return
    known = " or ".join(", ".join(names) for names in (AZURE, BURSTGPT))
    raise ConfigError(f"--trace: {path} has the columns {', '.join(columns) or 'of nothing'}; wanted are {known}, or JSON lines.")


def _columns(
    rows: Iterable[Mapping[str, str | None]], path: Path, names: Sequence[str], moment: Callable[[Any, str, str], float]
) -> Iterable[TracedRequest]:
    for number, row in enumerate(rows, start=2):
        where = f"--trace: {path}:{number}"
        prompt, output = (_count(row[name], where, name) for name in names[1:])
        arrival = moment(row[names[0]], where, names[0])
        yield TracedRequest(arrival=arrival, num_prompt_tokens=max(prompt, 1), num_output_tokens=output if prompt else 0)


def _count(value: object, where: str, name: str, *, least: int = 0) -> int:
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"\s*\d{1,12}\s*", value) else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKENS:
        raise ConfigError(f"{where}: {name} must be a whole number from {least} to {MOST_TOKENS}, not {value!r}.")
    return value


def _time(value: object, where: str, name: str) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ConfigError(f"{where}: {name} must be a number of seconds, not {value!r}.")
    return seconds


def _date(value: object, where: str, name: str) -> float:
    try:
        return datetime.fromisoformat(str(value).strip()).timestamp()
    except ValueError as error:
        raise ConfigError(f"{where}: {name} must be a date such as 2023-11-16 18:15:46.68, not {value!r}.") from error


def made_up(kind: str, text: str) -> Trace:
    """`rate` (requests a second; not of a burst, whose requests come at once), `prompt` and `output` (median tokens), and where wanted
    `requests` (1000), `sigma` (0; of the lengths' logarithms, which are normally distributed), `prefix` (0; tokens that all prompts begin with),
    `burstiness` (1) and `seed` (0). Raises `ConfigError`.
    """
    defaults = {"requests": 1000.0, "sigma": 0.0, "prefix": 0.0, "burstiness": 1.0, "seed": 0.0}
    wanted = {"prompt", "output"} | ({"rate"} if kind == "poisson" else set())
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, _, number = part.partition("=")
        if key not in {*wanted, *defaults}:
            raise ConfigError(f"--trace {kind}: has no {key!r}; use {', '.join(sorted({*wanted, *defaults}))}.")
        values[key] = _time(number, f"--trace {kind}:", key)
        if values[key] < 0 or (values[key] == 0 and key in {*wanted, "requests", "burstiness"}):
            raise ConfigError(f"--trace {kind}: {key} must be above 0, not {number}.")
    if missing := sorted(wanted - values.keys()):
        raise ConfigError(f"--trace {kind}: needs {', '.join(missing)}, such as {kind}:{'rate=4,' if kind == 'poisson' else ''}prompt=128,output=64.")
    found = defaults | values
    count, prefix = int(found["requests"]), int(found["prefix"])
    draw = random.Random(int(found["seed"]))

    def length(median: float) -> int:
        return max(1, round(median * math.exp(draw.gauss(0.0, found["sigma"])))) if found["sigma"] else max(1, round(median))

    moments = arrivals(count, rate=found.get("rate", math.inf), burstiness=found["burstiness"], seed=int(found["seed"]))
    requests = (
        TracedRequest(
            arrival=moment,
            num_prompt_tokens=prefix + length(found["prompt"]),
            num_output_tokens=length(found["output"]),
            prefix="shared" if prefix else None,
            num_prefix_tokens=prefix,
        )
        for moment in moments
    )
    return Trace(name=f"{kind}:{text}", requests=tuple(requests))


def bench_request(request: TracedRequest, number: int, *, seed: int = 0) -> BenchRequest:
    """A prompt of about its length. Those of other numbers or seeds are others; prompts that share a prefix begin with the same words."""
    shared = random.Random(f"prefix {request.prefix}").choices(WORDS, k=request.num_prefix_tokens)
    own = random.Random(f"{seed} {number}").choices(WORDS, k=request.num_prompt_tokens - request.num_prefix_tokens)
    return BenchRequest(prompt=" ".join([*shared, *own]), max_tokens=request.num_output_tokens)
