"""Which way of computing a config means."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.models.loader import find_gguf

logger = logging.getLogger("headrace.runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPath:
    name: str  # what EngineInfo.path says
    packed: bool  # GGUF weights stay in their blocks


def choose_path(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> ExecutionPath:
    """A GGUF file on CPU is served from its own blocks unless `--quantization none` or a `--dtype` says otherwise.

    The kernels are built, once a machine, and loaded; where that isn't possible a warning says why. Raises `ConfigError` where the model or
    the other flags can't go with `--quantization gguf`.
    """
    is_gguf = find_gguf(Path(config.model)) is not None
    if config.quantization is None and not (is_gguf and device.type == "cpu" and config.dtype == "auto"):
        return ExecutionPath(name="eager", packed=False)
    if config.quantization == "none":
        return ExecutionPath(name="eager", packed=False)
    if not is_gguf:
        raise ConfigError(f"--quantization gguf is for GGUF files, and {config.model} is a Hugging Face directory; leave the flag out.")
    if device.type != "cpu":
        raise ConfigError(f"--quantization gguf computes on CPU, not on {device}; use --quantization none or --device cpu.")
    if dtype != torch.float32:
        raise ConfigError(f"--quantization gguf computes in float32, not in {config.dtype}; leave --dtype at auto.")
    kernels = cpu.load()
    if kernels is None:
        logger.warning("no kernels for GGUF blocks: %s. The weights are dequantised, which takes more memory and time.", cpu.reason())
        return ExecutionPath(name="eager, dequantised GGUF weights (no CPU kernels)", packed=False)
    return ExecutionPath(name=f"eager, packed GGUF weights ({kernels.isa})", packed=True)
