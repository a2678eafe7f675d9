"""What `headrace tune` varies: flags of `headrace serve` and their values, as a config file has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headrace.cli import values
from headrace.cli.options import ENGINE_GROUPS, Option
from headrace.config import SpeculativeConfig
from headrace.plan.search import Axis
from headrace.plan.slo import Limit
from headrace.plan.tuning import TrialResult

DEFAULT = "default"  # the flag is not given
SIMULATED = frozenset({"max-num-seqs", "max-num-batched-tokens", "target-itl-ms", "block-size"})
NGRAM = asdict(SpeculativeConfig())


def _options() -> dict[str, Option]:
    return {name: option for _, group in ENGINE_GROUPS for option in group for name in option.names}


def parse_axis(text: str) -> Axis:
    """`max-num-seqs=4,8,16`. Raises `ValueError`, which says what would be right."""
    name, equals, listed = text.partition("=")
    option = _options().get(name.removeprefix("--").replace("_", "-"))
    if not equals or not listed or option is None:
        raise ValueError("use FLAG=VALUE,VALUE with a flag of `headrace serve`, such as max-num-seqs=4,8,16")
    return _axis(option.flag, [_value(option, part) for part in ((listed,) if "{" in listed else values.listed(listed, str))])


def _value(option: Option, text: str) -> Any:
    if text == DEFAULT:
        return None
    value = option.read(text)
    if option.choices and value not in option.choices:
        raise ValueError(f"{option.flag} is one of {', '.join(option.choices)}")
    return _plain(option, value)


def _plain(option: Option, value: Any) -> Any:
    if isinstance(value, SpeculativeConfig):
        return asdict(value)
    if option.read is values.size_in_gib:
        return f"{value}B"  # a number alone would be in GiB
    return list(value) if isinstance(value, tuple) else value


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that stay, as JSON and YAML have them. Keys of the server are left out: a trial has one of its own."""
    options = _options()
    return {flag: _plain(options[flag], value) for flag, value in settings.items() if flag in options}


def _axis(name: str, found: Iterable[Any]) -> Axis:
    listed = list(dict.fromkeys(map(_hashable, found)))
    kept = [dict(value) if isinstance(value, tuple) else value for value in listed]
    ordered = all(isinstance(value, int | float) and not isinstance(value, bool) for value in kept)
    return Axis(name=name, values=tuple(sorted(kept)) if ordered else tuple(kept), ordered=ordered)


def _hashable(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else value


def merged(axes: Sequence[Axis]) -> list[Axis]:
    """Flags that were given again have all their values."""
    found: dict[str, list[Any]] = {}
    for axis in axes:
        found.setdefault(axis.name, []).extend(axis.values)
    return [_axis(name, listed) for name, listed in found.items()]


def default_axes(limits: Sequence[Limit]) -> list[Axis]:
    """Those that matter most first."""
    from headrace.runner.memory import physical_cores

    cores = physical_cores()
    axes = [
        _axis("max-num-seqs", [4, 8, 16, 32, 64, 128]),
        _axis("threads", sorted({1, max(1, cores // 2), max(1, cores - 1), cores})),
        _axis("max-num-batched-tokens", [256, 512, 1024, 2048, 4096]),
        _axis("speculative-config", [None, NGRAM]),
        _axis("block-size", [16, 32]),
    ]
    itl = min((limit.seconds * 1e3 for limit in limits if limit.metric in ("itl", "tpot")), default=None)
    if itl is not None:
        axes.insert(2, _axis("target-itl-ms", [None, round(itl / 2, 3), round(itl, 3)]))
    return [axis for axis in axes if len(axis.values) > 1]


def of_axes(trials: Iterable[TrialResult], axes: Sequence[Axis]) -> list[TrialResult]:
    """Those trials whose settings are values of these axes: the file may hold others, of an earlier --search."""
    values = {axis.name: axis.values for axis in axes}
    return [
        trial for trial in trials if trial.settings.keys() == values.keys() and all(value in values[name] for name, value in trial.settings.items())
    ]


def start_value(axis: Axis) -> Any:
    """What the flag is without being given, where that is among the values; else the one in their middle."""
    default = _options()[axis.name].default
    if axis.name == "threads":
        default = max(axis.values) if axis.ordered else None
    return default if default in axis.values else axis.values[len(axis.values) // 2]
