"""One workload, eagerly or by `torch.compile`, measured in a process of its own: `python -m headrace.bench.inside.eager_compiled SPEC`.

A process of its own, so that its peak memory is its own. The result is printed as one JSON object, the last line of stdout.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import Tensor, nn

from headrace.errors import ConfigError

Workload = Literal["decode", "prefill", "resnet50", "vit-large"]
WORKLOADS = get_args(Workload)
IMAGE = 224  # pixels of a side
WARM_UP = 2  # calls behind the first that are not measured
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    workload: Workload
    dtype: Literal["float32", "bfloat16", "float16"]
    compiled: bool
    model: str | None  # of decode and prefill: a path that is there
    device: str = "cpu"
    threads: int | None = None
    rows: int = 8  # that decode
    context: int = 256  # tokens behind each of them
    prompt_tokens: int = 256
    images: int = 4  # in a batch
    repeats: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    first_seconds: float  # the first call, compiling included
    latency_ms: float  # median of the calls behind the warm-up
    latencies_ms: list[float]
    items: int  # tokens or images of a call
    items_per_second: float
    peak_memory_bytes: int  # of the device; on CPU the largest resident set of the process


def measure(spec: Spec) -> Result:
    device = torch.device(spec.device)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        call, items = _workload(spec, device)
        first = _seconds(call, device)
        for _ in range(WARM_UP):
            _seconds(call, device)
        seconds = [_seconds(call, device) for _ in range(spec.repeats)]
    median = statistics.median(seconds)
    return Result(
        first_seconds=first,
        latency_ms=1e3 * median,
        latencies_ms=[1e3 * one for one in seconds],
        items=items,
        items_per_second=items / median,
        peak_memory_bytes=_peak_memory(device),
    )


def _seconds(call: Call, device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _workload(spec: Spec, device: torch.device) -> tuple[Call, int]:
    """One call of it, and how many items that computes."""
    if spec.workload in ("decode", "prefill"):
        return _decoder_call(spec, device)
    model = image_model(spec.workload).to(device, getattr(torch, spec.dtype)).eval()
    images = torch.randn(spec.images, 3, IMAGE, IMAGE, device=device, dtype=getattr(torch, spec.dtype))
    run = _compiled(model, spec)
    return lambda: run(images).logits, spec.images


def _decoder_call(spec: Spec, device: torch.device) -> tuple[Call, int]:
    from headrace.bench.inside.plain_decoder import PlainDecoder
    from headrace.models.loader import load_model

    assert spec.model is not None
    decoder = load_model(spec.model, dtype=getattr(torch, spec.dtype), device=device)
    decodes = spec.workload == "decode"
    rows, tokens, start = (spec.rows, 1, spec.context) if decodes else (1, spec.prompt_tokens, 0)
    model = PlainDecoder(decoder, rows=rows, length=start + tokens)
    ids_BT = torch.randint(decoder.config.vocab_size, (rows, tokens), device=device)
    positions_T = torch.arange(start, start + tokens, device=device)
    run = _compiled(model, spec)
    return lambda: run(ids_BT, positions_T), rows * tokens


def _compiled(model: nn.Module, spec: Spec) -> Callable[..., Any]:
    return torch.compile(model, fullgraph=True, dynamic=False) if spec.compiled else model


def image_model(workload: str) -> nn.Module:
    """ResNet-50 or ViT-L/16 with random weights, by transformers. Raises `ConfigError` where that is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"The workload {workload} needs transformers: pip install 'headrace[vision]', or leave it out of --workloads.")
    from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

    if workload == "resnet50":
        return ResNetForImageClassification(ResNetConfig(num_labels=1000))  # the config's defaults are those of ResNet-50
    large = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, image_size=IMAGE, num_labels=1000)
    return ViTForImageClassification(large)


def main(text: str) -> int:
    spec = msgspec.json.decode(text, type=Spec)
    try:
        result = measure(spec)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
