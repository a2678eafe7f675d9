"""Which device and dtype a config means."""

from __future__ import annotations

import torch

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.runner.execution_path import ExecutionPath
from headrace.runner.kv_storage import cpu_budget
from headrace.runner.memory import available_host_memory

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N. Raises `ConfigError` for another name or a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is not known; use auto, cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is not supported; use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu.")
    return device


def resolve_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """auto: float32 on CPU, the checkpoint's dtype on CUDA."""
    if name != "auto":
        return _DTYPES[name]
    return torch.float32 if device.type == "cpu" else checkpoint


def resolve_kv_dtype(name: str, dtype: torch.dtype, path: ExecutionPath) -> torch.dtype:
    """auto: the model's `dtype`; float16 where the weights are rounded far more than that."""
    if name != "auto":
        return _DTYPES[name]
    return torch.float16 if path.packed or path.bits is not None else dtype


def kv_budget(config: EngineConfig, device: torch.device, peak_bytes: int) -> int:
    """Bytes for KV storage with the weights loaded; on CUDA a step's work space of `peak_bytes` is left free. Raises `ConfigError`."""
    if device.type == "cpu":
        return cpu_budget(config, available_host_memory())
    free, total = torch.cuda.mem_get_info(device)
    if config.kv_memory is not None:
        if config.kv_memory > free:
            raise ConfigError(f"--kv-memory asks for {config.kv_memory} bytes, but only {free} are free on {device}.")
        return config.kv_memory
    return int(total * config.gpu_memory_utilization) - (total - free) - peak_bytes
