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
    packed: bool = False  # GGUF weights stay in their blocks
    kernels: bool = False  # floating point weights, computed with by the CPU kernels


def choose_path(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> ExecutionPath:
    """On CPU the kernels are built, once a machine, and loaded; where that isn't possible a warning says why, and torch's operators compute.

    Raises `ConfigError` where the model or the other flags can't go with it.
    """
    if config.quantization != "gguf":
        return _float_path(device)
    if find_gguf(Path(config.model)) is None:
        raise ConfigError(f"--quantization gguf is for GGUF files, and {config.model} is a Hugging Face directory; leave the flag out.")
    if device.type != "cpu":
        raise ConfigError(f"--quantization gguf computes on CPU, not on {device}; use --quantization none or --device cpu.")
    if dtype != torch.float32:
        raise ConfigError(f"--quantization gguf computes in float32, not in {config.dtype}; leave --dtype at auto.")
    kernels = cpu.load()
    if kernels is None:
        logger.warning("--quantization gguf: %s. The weights are dequantised instead, which takes more memory and time.", cpu.reason())
        return ExecutionPath(name="eager, dequantised GGUF weights (no CPU kernels)")
    return ExecutionPath(name=f"eager, packed GGUF weights ({kernels.isa})", packed=True)


def _float_path(device: torch.device) -> ExecutionPath:
    if device.type != "cpu":
        return ExecutionPath(name="eager")
    kernels = cpu.load()
    if kernels is None:
        logger.warning("There are no CPU kernels: %s. torch's operators compute instead, which takes more time.", cpu.reason())
        return ExecutionPath(name="eager, torch operators (no CPU kernels)")
    return ExecutionPath(name=f"eager, CPU kernels ({kernels.isa})", kernels=True)
