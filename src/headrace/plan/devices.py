"""Devices that are not here: a step's time from what is published of them (a roofline).

    seconds = overhead + max(bytes / (bandwidth * share), operations / (peak * share))

Bytes are the weights once, and the keys and values that rows of one token attend to. Operations are two for each weight and token (of the last
matrix only for rows that yield a token), and four for each head, dimension and attended position. The shares say how much of the published
figures kernels reach; they are assumptions, and printed as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.core.step_work import StepWork

BANDWIDTH_SHARE = 0.8  # of the published memory bandwidth that decode kernels reach
COMPUTE_SHARE = 0.5  # of the published dense peak that prefill kernels reach
OVERHEAD_S = 0.0005  # of a step: launches, sampling, handing over
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WORK_SPACE = 0.05  # of the device's memory, for activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    memory: float  # bytes
    bandwidth: float  # bytes a second
    peak: float  # dense operations a second in bfloat16 (float16 where it has none), without sparsity
    source: str


def _device(memory_gb: float, bandwidth_gb: float, peak_tera: float, source: str) -> Device:
    return Device(memory=memory_gb * 1e9, bandwidth=bandwidth_gb * 1e9, peak=peak_tera * 1e12, source=source)


DEVICES = {
    "b200": _device(180, 8000, 2250, "NVIDIA HGX B200 data sheet, an eighth of the board"),
    "h200": _device(141, 4800, 989, "NVIDIA H200 data sheet, SXM"),
    "h100": _device(80, 3350, 989, "NVIDIA H100 data sheet, SXM"),
    "a100-80gb": _device(80, 2039, 312, "NVIDIA A100 data sheet, 80 GB SXM"),
    "a100-40gb": _device(40, 1555, 312, "NVIDIA A100 data sheet, 40 GB"),
    "l40s": _device(48, 864, 362, "NVIDIA L40S data sheet"),
    "l4": _device(24, 300, 121, "NVIDIA L4 data sheet"),
    "a10": _device(24, 600, 125, "NVIDIA A10 data sheet"),
    "t4": _device(16, 300, 65, "NVIDIA T4 data sheet, float16"),
    "rtx4090": _device(24, 1008, 165, "NVIDIA Ada architecture white paper, float32 accumulation"),
    "mi300x": _device(192, 5300, 1307, "AMD Instinct MI300X data sheet"),
}


class Shape(Protocol):
    """What is asked of a `models.model_config.ModelConfig`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    layer_weights: int  # in all layers' matrices
    head_weights: int  # in the matrix that makes logits
    embedding_weights: int  # beside it; only looked up
    attention_operations: int  # for each attended position of a token
    kv_bytes: int  # of a token's keys and values
    weight_bytes: int  # of one weight

    @property
    def memory(self) -> int:
        return (self.layer_weights + self.head_weights + self.embedding_weights) * self.weight_bytes


def model_size(config: Shape, *, dtype: str, kv_dtype: str) -> ModelSize:
    """Of a dense decoder with gated MLPs; norms and biases are left out."""
    hidden, head = config.hidden_size, config.head_dim
    layer = hidden * head * (2 * config.num_heads + 2 * config.num_kv_heads) + 3 * hidden * config.intermediate_size
    return ModelSize(
        layer_weights=layer * config.num_layers,
        head_weights=config.vocab_size * hidden,
        embedding_weights=0 if config.tie_word_embeddings else config.vocab_size * hidden,
        attention_operations=4 * config.num_heads * head * config.num_layers,
        kv_bytes=2 * config.num_kv_heads * head * config.num_layers * BYTES[kv_dtype],
        weight_bytes=BYTES[dtype],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts:
    device: Device
    model: ModelSize
    bandwidth_share: float = BANDWIDTH_SHARE
    compute_share: float = COMPUTE_SHARE

    def seconds(self, work: StepWork) -> float:
        model, device = self.model, self.device
        positions = work.decode_attended + work.prompt_attended
        read = (model.layer_weights + model.head_weights) * model.weight_bytes + model.kv_bytes * work.decode_attended
        operations = 2 * (model.layer_weights * work.tokens + model.head_weights * work.sampled) + model.attention_operations * positions
        return OVERHEAD_S + max(read / (device.bandwidth * self.bandwidth_share), operations / (device.peak * self.compute_share))


def kv_blocks(device: Device, model: ModelSize, *, block_size: int, memory_share: float, kv_memory: int | None) -> int:
    """How many blocks fit beside the weights; 0 or less where the model itself does not fit."""
    room = device.memory * (memory_share - WORK_SPACE) - model.memory if kv_memory is None else float(kv_memory)
    return int(room // (model.kv_bytes * block_size))
