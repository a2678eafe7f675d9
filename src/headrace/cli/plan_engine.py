"""What a plan simulates: an engine of this machine, measured, or of another device, from what is published of it."""

from __future__ import annotations

import itertools
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.bench.sse_client import Target
from headrace.bench.traces import Trace, bench_request
from headrace.bench.workload import BenchRequest
from headrace.cli.api_client import ApiClient
from headrace.cli.benches.provenance import machine
from headrace.cli.config_text import config_text
from headrace.cli.local_server import local_server
from headrace.cli.settings import engine_options
from headrace.config import EngineConfig, SchedulerConfig
from headrace.errors import ConfigError
from headrace.plan import devices
from headrace.plan.costs import Measured, fit
from headrace.plan.fleet import Engine
from headrace.plan.measure import LEVEL_S, Measurement, levels, measure
from headrace.plan.simulator import Delays

# the scheduler's own settings: the simulation takes them as they are, whatever was measured
SIMULATED = frozenset(
    {
        "block-size",
        "num-gpu-blocks-override",
        "max-num-seqs",
        "max-num-batched-tokens",
        "max-num-queued-reqs",
        "enable-prefix-caching",
        "enable-chunked-prefill",
        "target-itl-ms",
        "async-scheduling",
        "scheduling-policy",
    }
)
PUBLISHED = SIMULATED | {"max-model-len", "dtype", "kv-cache-dtype", "kv-memory", "gpu-memory-utilization"}
UNKNOWN = {
    "swap-space": "how long swapping takes is not known to the simulation",
    "speculative-config": "how many guesses are right depends on the text",
}


def measured(trace: Trace, model: str | None, settings: Mapping[str, Any], path: Path | None) -> tuple[Engine, list[str]]:
    """The engine of this machine and what its figures assume. Raises `ConfigError` for settings that `path` was not measured with."""
    _refuse_unknown(settings)
    served = {flag: value for flag, value in settings.items() if flag not in SIMULATED}
    flags = tuple(config_text(served).splitlines()) if served else ()
    if path is not None and path.exists():
        found = Measured.read(path)
        if found.flags is not None and (found.flags != flags or found.model != _name(model)):
            raise ConfigError(
                f"--step-costs: {path} was measured of {found.model} with {', '.join(found.flags) or 'default flags'}, not of {_name(model)} with "
                f"{', '.join(flags) or 'default flags'}. Name another file to measure."
            )
    else:
        found = _measure(trace, model, settings, flags)
        if path is not None:
            found.write(path)
    engine = simulated(found, trace, settings)
    fitted, delays = fit(found.samples), engine.delays
    spread = fitted.spread()
    around = (delays.before + delays.after) * 1e3
    assumptions = [
        f"{found.model} on {found.machine}: {len(found.samples)} measured steps; half of them are within "
        f"{100 * spread['decode']:.0f} % (decodes) and {100 * spread['prompt']:.0f} % (with prompts) of the fit",
        f"beside the engine a request takes {around:.1f} ms and {delays.before_token * 1e6:.1f} us a prompt token; "
        f"{delays.handoff * 1e3:.2f} ms lie between two steps",
        f"after 0.1 s without a step the next one takes {fitted.cold(0.1) * 1e3:.1f} ms more, after a second {fitted.cold(1.0) * 1e3:.1f} ms",
        *_common(engine.config),
    ]
    return engine, assumptions


def simulated(found: Measured, trace: Trace, settings: Mapping[str, Any]) -> Engine:
    """What was measured, with these settings of the scheduler."""
    num_blocks = found.num_blocks * found.block_size // int(settings.get("block-size", 16))
    fitted = fit(found.samples)
    return Engine(
        config=scheduler_config(trace, settings, max_model_len=found.max_model_len, num_blocks=num_blocks),
        costs=fitted.with_noise,  # each engine has a seed of its own
        delays=Delays(handoff=found.handoff_s, before=found.before_s, before_token=found.before_token_s, after=found.after_s, cold=fitted.cold),
        async_scheduling=settings.get("async-scheduling", True),
        known=found.samples,  # as those of a server that has served for a while
    )


def published(trace: Trace, model: str | None, settings: Mapping[str, Any], name: str) -> tuple[Engine, list[str]]:
    """An engine of a device of `devices.DEVICES`. Raises `ConfigError` for a model that does not fit, and for settings without a meaning there."""
    _refuse_unknown(settings)
    if strange := sorted(set(settings) - PUBLISHED):
        raise ConfigError(f"--{strange[0]} has no meaning for a device that is not here.")
    from headrace.models.loader import load_config
    from headrace.models.store import resolve_model

    config = load_config(str(resolve_model(model)))
    dtype = settings.get("dtype", "auto")
    dtype = "bfloat16" if dtype == "auto" else dtype
    kv_dtype = settings.get("kv-cache-dtype", "auto")
    kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
    device, size = devices.DEVICES[name], devices.model_size(config, dtype=dtype, kv_dtype=kv_dtype)
    share, block_size = settings.get("gpu-memory-utilization", 0.9), settings.get("block-size", 16)
    blocks = devices.kv_blocks(device, size, block_size=block_size, memory_share=share, kv_memory=settings.get("kv-memory"))
    max_model_len = settings.get("max-model-len") or config.max_position_embeddings
    if "max-model-len" not in settings:
        max_model_len = min(max_model_len, max(blocks, 1) * block_size)
    if blocks * block_size < max_model_len:
        raise ConfigError(
            f"--device {name}: the weights take {size.memory / 1e9:.1f} of {device.memory / 1e9:.0f} GB in {dtype}, which leaves room for "
            f"{max(blocks, 0) * block_size} tokens. Lower --max-model-len, or choose a larger device."
        )
    scheduler = scheduler_config(trace, settings, max_model_len=max_model_len, num_blocks=blocks)
    costs = devices.RooflineCosts(device=device, model=size)
    assumptions = [
        f"{name}: {device.memory / 1e9:.0f} GB, {device.bandwidth / 1e9:.0f} GB/s, {device.peak / 1e12:.0f} TFLOP/s ({device.source}), "
        "not measured here",
        f"kernels reach {100 * costs.bandwidth_share:.0f} % of the bandwidth and {100 * costs.compute_share:.0f} % of the peak; "
        f"each step takes {devices.OVERHEAD_S * 1e3:g} ms more",
        f"{_name(model)} in {dtype}: {size.memory / 1e9:.2f} GB of weights, {size.kv_bytes} bytes of keys and values a token ({kv_dtype}); "
        "one device an engine",
        "nothing is added for HTTP, tokenising and the network",
        *_common(scheduler),
    ]
    return Engine(config=scheduler, costs=lambda number: costs, delays=Delays(), async_scheduling=settings.get("async-scheduling", True)), assumptions


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    for flag, why in UNKNOWN.items():
        if settings.get(flag):
            raise ConfigError(f"--{flag} cannot be planned with: {why}.")


def _name(model: str | None) -> str:
    from headrace.models.store import DEFAULT_MODEL

    return model or DEFAULT_MODEL


def _common(config: SchedulerConfig) -> list[str]:
    return [
        f"an engine runs {config.max_num_seqs} requests at once, {config.max_num_batched_tokens} tokens a step, "
        f"{config.num_blocks} KV blocks of {config.block_size} tokens, and refuses requests of more than {config.max_model_len} tokens",
        "requests are dealt out to engines in turn; answers have exactly the trace's lengths",
    ]


def scheduler_config(trace: Trace, settings: Mapping[str, Any], *, max_model_len: int, num_blocks: int) -> SchedulerConfig:
    engine = EngineConfig(model="", **engine_options(settings))
    shares = any(request.prefix is not None for request in trace.requests)
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        num_blocks=engine.num_gpu_blocks_override or num_blocks,
        enable_prefix_caching=engine.enable_prefix_caching and shares,  # where nothing is shared a cache finds nothing
        enable_chunked_prefill=engine.enable_chunked_prefill,
        scheduling_policy=engine.scheduling_policy,
        max_num_queued_reqs=engine.max_num_queued_reqs,
        target_itl_ms=engine.target_itl_ms,
    )


def _measure(trace: Trace, model: str | None, settings: Mapping[str, Any], flags: tuple[str, ...]) -> Measured:
    from tqdm import tqdm

    from headrace.models.store import resolve_model

    path = Path(_name(model)) if "runner-factory" in settings else resolve_model(model)  # another runner gives the name its own meaning
    key = secrets.token_hex(16)
    clients = levels(int(settings.get("max-num-seqs", 64)))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(config_text(settings))
        file.flush()
        with (
            local_server(path, ["--config", file.name], key=key) as server,
            tqdm(total=len(clients), desc="measuring steps", unit="load", dynamic_ncols=True, file=sys.stderr, leave=False) as bar,
        ):
            api = ApiClient(server.url, api_key=key)
            found = measure(
                Target(server.url, api_key=key),
                lambda seconds: api.call("POST", f"/debug/trace?seconds={seconds:g}"),
                prompts(trace),
                model=server.model(),
                clients=clients,
                level_s=LEVEL_S,
                on_level=lambda: bar.update() and None,
            )
            status = api.call("GET", "/v1/status")
    return described(found, status, model=_name(model), flags=flags, settings=settings)


def described(found: Measurement, status: Mapping[str, Any], *, model: str, flags: tuple[str, ...], settings: Mapping[str, Any]) -> Measured:
    """What was found on a server of this machine, with all that says where. `status`: its `/v1/status`."""
    return Measured(
        model=model,
        machine=machine(),
        flags=flags,
        num_blocks=status["engine"]["kv_blocks"]["total"],
        block_size=int(settings.get("block-size", 16)),
        max_model_len=status["max_model_len"],
        handoff_s=found.handoff_s,
        before_s=found.before_s,
        before_token_s=found.before_token_s,
        after_s=found.after_s,
        samples=found.samples,
    )


def prompts(trace: Trace) -> Iterator[BenchRequest]:
    """The trace's requests for ever, each time with other words."""
    for number, request in enumerate(itertools.cycle(trace.requests)):
        yield bench_request(request, number, seed=1)
