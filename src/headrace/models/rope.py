"""Rotary position embeddings: the plain form and its scalings, in one place.

A scaling changes the inverse frequencies, and for yarn and longrope the amplitude too. Two of them (dynamic NTK, longrope) also depend on
how long the sequence is *now*. The length that counts for a token is max(length of its row's prompt, its position + 1): the prompt
is turned with the frequencies of its full length, each later token with its own. So the result is that of one uncut prefill followed by
decoding, however the scheduler cuts the work. (Tokens taken from the prefix cache keep the frequencies they were computed with.)

Shape suffixes: T tokens, F frequencies (half the rotated size), D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.errors import ModelLoadError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Everything that fixes the rotation of a layer. Only the fields that `kind` uses are set."""

    kind: RopeKind
    theta: float
    rotary_dim: int  # the first so many of a head's dimensions turn
    factor: float = 1.0
    original_max_position: int = 0  # length the model was trained with before scaling
    amplitude: float = 1.0  # on cos and sin
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()
    frequency_divisors: tuple[float, ...] = ()  # ready-made scaling of a GGUF file

    @property
    def length_dependent(self) -> bool:
        return self.kind in ("dynamic", "longrope")


def parse_rope(fields: Mapping[str, Any], *, theta: float, head_dim: int, max_position: int, original_max_position: int | None) -> RopeConfig:
    """From the `rope_parameters` (or `rope_scaling`) object of a config.json; `theta` holds where the object brings none.

    `original_max_position` is the config's own field of that name, which wins over the object's. Raises ModelLoadError.
    """
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in _KINDS:
        raise ModelLoadError(f"RoPE scaling type {kind!r} is not supported; supported are {', '.join(_KINDS)}.")

    def number(name: str, default: float | None = None) -> float:
        value = fields.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(f"RoPE scaling {kind!r} needs a number in {name!r}, not {value!r}.")
        return float(value)

    rotary_dim = int(head_dim * number("partial_rotary_factor", 1.0))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ModelLoadError(f"A rotary size of {rotary_dim} does not fit heads of {head_dim}; check partial_rotary_factor.")
    original = original_max_position or int(number("original_max_position_embeddings", max_position))
    common: dict[str, Any] = {"kind": kind, "theta": number("rope_theta", theta), "rotary_dim": rotary_dim}
    if common["theta"] <= 0 or original < 1:
        raise ModelLoadError("rope_theta and original_max_position_embeddings must be above 0.")
    if kind == "default":
        return RopeConfig(**common)
    if kind in ("yarn", "longrope"):
        factor = number("factor", max_position / original)
    else:
        factor = number("factor")
    common["factor"] = factor
    if factor <= 0:
        raise ModelLoadError(f"RoPE scaling {kind!r} needs a factor above 0, not {factor}.")
    if kind == "linear":
        return RopeConfig(**common)
    if kind == "dynamic":
        return RopeConfig(**common, original_max_position=max_position)
    common["original_max_position"] = original
    if kind == "llama3":
        return RopeConfig(**common, low_freq_factor=number("low_freq_factor"), high_freq_factor=number("high_freq_factor"))
    if kind == "yarn":
        return RopeConfig(
            **common,
            amplitude=number("attention_factor", _yarn_amplitude(factor, fields.get("mscale"), fields.get("mscale_all_dim"))),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(fields.get("truncate", True)),
        )
    amplitude = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        values = fields.get(name)
        if not isinstance(values, list | tuple) or len(values) != rotary_dim // 2:
            raise ModelLoadError(f"RoPE scaling 'longrope' needs {rotary_dim // 2} numbers in {name!r}.")
        factors[name] = tuple(float(value) for value in values)
    return RopeConfig(**common, amplitude=number("attention_factor", amplitude), **factors)


def _yarn_amplitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def amplitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return amplitude(mscale) / amplitude(mscale_all_dim)
    return amplitude(1.0)


TABLE_POSITIONS = 8192  # 4 MiB at a rotary size of 64
_FIRST_TABLE = 1024


class RotaryEmbedding:
    """cos and sin of a step's positions.

    On CPU those of the first `TABLE_POSITIONS` are kept once they were needed: torch hands even a few thousand cosines to its threads, which want
    cores that are busy with the step before, and a prompt of 128 tokens can wait a millisecond for them.
    """

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}  # each [positions, 1, rotary_dim]
        self._exponents_F = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
        plain_F = 1.0 / config.theta**self._exponents_F
        self._long_F: Tensor | None = None
        match config.kind:
            case "linear":
                plain_F = plain_F / config.factor
            case "llama3":
                plain_F = _llama3(config, plain_F)
            case "yarn":
                plain_F = _yarn(config, self._exponents_F)
            case "longrope":
                self._long_F = 1.0 / (torch.tensor(config.long_factor, device=device) * config.theta**self._exponents_F)
                plain_F = 1.0 / (torch.tensor(config.short_factor, device=device) * config.theta**self._exponents_F)
        if config.frequency_divisors:
            plain_F = plain_F / torch.tensor(config.frequency_divisors, device=device)
        self._inverse_F = plain_F

    def __getstate__(self) -> dict[str, Any]:
        """Copies make tables of their own."""
        return self.__dict__ | {"_tables": {}}

    def cos_sin(self, positions_T: Tensor, length_T: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, rotary_dim] in `dtype`, for `rotate`. `length_T` [T] int64: needed if `config.length_dependent`."""
        if positions_T.device.type == "cpu" and not self.config.length_dependent and not torch.compiler.is_compiling() and len(positions_T):
            num_positions = int(positions_T.max()) + 1
            if num_positions <= TABLE_POSITIONS:
                cos, sin = self._table(num_positions, dtype)
                return cos.index_select(0, positions_T), sin.index_select(0, positions_T)
        return self._compute(positions_T, length_T, dtype)

    def _table(self, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of so many positions, or more."""
        table = self._tables.get(dtype)
        if table is None or len(table[0]) < num_positions:
            size = max(_FIRST_TABLE, 1 << (num_positions - 1).bit_length())
            with torch.inference_mode(mode=False), torch.no_grad():  # it outlives the step that makes it
                table = self._tables[dtype] = self._compute(torch.arange(size, device=self._inverse_F.device), None, dtype)
        return table

    def _compute(self, positions_T: Tensor, length_T: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles_TF = positions_T[:, None].float() * self._inverse_frequencies(length_T)
        cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
        if self.config.amplitude != 1.0:
            cos_TF, sin_TF = cos_TF * self.config.amplitude, sin_TF * self.config.amplitude
        cos = torch.cat((cos_TF, cos_TF), dim=-1)[:, None].to(dtype)
        sin = torch.cat((-sin_TF, sin_TF), dim=-1)[:, None].to(dtype)
        return cos, sin

    def _inverse_frequencies(self, length_T: Tensor | None) -> Tensor:
        """[F], or [T, F] where they depend on the length."""
        config = self.config
        if not config.length_dependent:
            return self._inverse_F
        assert length_T is not None
        if self._long_F is not None:
            return torch.where((length_T > config.original_max_position)[:, None], self._long_F, self._inverse_F)
        stretch_T = config.factor * length_T.clamp(min=config.original_max_position) / config.original_max_position - (config.factor - 1)
        base_T = config.theta * stretch_T ** (config.rotary_dim / (config.rotary_dim - 2))
        return 1.0 / base_T[:, None] ** self._exponents_F


def rotary_embeddings(ropes: Iterable[RopeConfig | None], device: torch.device) -> dict[RopeConfig, RotaryEmbedding]:
    """One for each kind of rotation that a model's layers have."""
    return {rope: RotaryEmbedding(rope, device) for rope in ropes if rope is not None}


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first cos.shape[-1] dimensions of each head; the two halves of that part are the pairs."""
    size = cos.shape[-1]
    if size < x_THD.shape[-1]:
        return torch.cat((rotate(x_THD[..., :size], cos, sin), x_THD[..., size:]), dim=-1)
    return torch.addcmul(x_THD * cos, x_THD.roll(size // 2, dims=-1), sin)


def _llama3(config: RopeConfig, plain_F: Tensor) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    wavelength_F = 2 * math.pi / plain_F
    turns_F = config.original_max_position / wavelength_F
    blend_F = ((turns_F - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return (1 - blend_F) * plain_F / config.factor + blend_F * plain_F


def _yarn(config: RopeConfig, exponents_F: Tensor) -> Tensor:
    """Dimensions that turn more than beta_fast times in the trained length are kept, those under beta_slow interpolated."""

    def dimension(turns: float) -> float:
        return config.rotary_dim * math.log(config.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    index_F = torch.arange(len(exponents_F), dtype=torch.float32, device=exponents_F.device)
    interpolated_F = ((index_F - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    powers_F = config.theta**exponents_F
    return interpolated_F / (config.factor * powers_F) + (1 - interpolated_F) / powers_F
