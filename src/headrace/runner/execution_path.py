"""Which way of computing a config means."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.models.loader import find_gguf
from headrace.models.packed_sources import Bits

logger = logging.getLogger("headrace.runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPath:
    name: str  # what EngineInfo.path says
    packed: bool = False  # GGUF weights stay in their blocks
    kernels: bool = False  # weights of any model, computed with by the CPU kernels
    bits: Bits | None = None  # with kernels: the weights are rounded to so many bits
    wide: bool = False  # activations of 16 bits against weights in blocks


def choose_path(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> ExecutionPath:
    """A GGUF file on CPU is served from its own blocks unless `--quantization none` or a `--dtype` says otherwise.

    On CPU the kernels are built, once a machine, and loaded; where that isn't possible a warning says why, and torch's operators compute.
    Raises `ConfigError` where the model or the other flags can't go with the kind of `--quantization`.
    """
    is_gguf, kind = find_gguf(Path(config.model)) is not None, config.quantization
    if kind is None and is_gguf and device.type == "cpu" and config.dtype == "auto":
        kind = "gguf"
    if kind in (None, "none"):
        if config.activation_bits is not None:
            raise ConfigError(
                "--activation-bits is about products with quantised weights, and these are floats; use --quantization, or leave it out."
            )
        return _float_path(device)
    if kind == "gguf" and not is_gguf:
        raise ConfigError(
            f"--quantization gguf is for GGUF files, and {config.model} is a Hugging Face directory; use int8 or int4, or leave it out."
        )
    if device.type != "cpu":
        raise ConfigError(f"--quantization {kind} computes on CPU, not on {device}; use --quantization none or --device cpu.")
    if dtype != torch.float32:
        raise ConfigError(f"--quantization {kind} computes in float32, not in {config.dtype}; leave --dtype at auto.")
    if kind != "gguf":
        return _with_activations(_rounded_path(kind), config)
    kernels = cpu.load()
    if kernels is None:
        logger.warning("There are no CPU kernels: %s. The GGUF weights are dequantised, which takes more memory and time.", cpu.reason())
        return ExecutionPath(name="eager, dequantised GGUF weights (no CPU kernels)")
    return _with_activations(ExecutionPath(name=f"eager, packed GGUF weights ({kernels.isa})", packed=True), config)


def _with_activations(path: ExecutionPath, config: EngineConfig) -> ExecutionPath:
    return replace(path, name=f"{path.name}, 16-bit activations", wide=True) if config.activation_bits == 16 else path


def _rounded_path(kind: str) -> ExecutionPath:
    kernels = cpu.load()
    if kernels is None:
        raise ConfigError(f"--quantization {kind} needs the CPU kernels: {cpu.reason()}. Or leave the flag out.")
    return ExecutionPath(name=f"eager, {kind} weights ({kernels.isa})", kernels=True, bits=8 if kind == "int8" else 4)


def _float_path(device: torch.device) -> ExecutionPath:
    if device.type != "cpu":
        return ExecutionPath(name="eager")
    kernels = cpu.load()
    if kernels is None:
        logger.warning("There are no CPU kernels: %s. torch's operators compute instead, which takes more time.", cpu.reason())
        return ExecutionPath(name="eager, torch operators (no CPU kernels)")
    return ExecutionPath(name=f"eager, CPU kernels ({kernels.isa})", kernels=True)
