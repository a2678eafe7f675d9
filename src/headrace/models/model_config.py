"""What a model is, as one frozen value; made from the fields of a config.json (those of a GGUF file are first given the same names)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import ModelLoadError
from headrace.models.registry import Architecture
from headrace.models.rope import RopeConfig, parse_rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str  # model_type of its row in models.registry
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # longest context the model is meant for, scaling included
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    torch_dtype: torch.dtype  # of the checkpoint
    pre_norm: bool
    post_norm: bool
    qk_norm: Literal["head", "full"] | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embedding_scale: float
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    sliding_windows: tuple[int | None, ...]  # per layer; None: the whole context
    ropes: tuple[RopeConfig | None, ...]  # per layer; None: no rotation
    eos_token_ids: tuple[int, ...]  # every token that ends a turn, ascending
    bos_token_id: int | None


class _Fields:
    """Checked access to a config's fields over its family's defaults."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.values, self.defaults, self.where = values, defaults, where

    def get(self, name: str) -> Any:
        """None where the field is absent or null and has no default."""
        return self.values[name] if name in self.values else self.defaults.get(name)

    def count(self, name: str, default: int | None = None, *, most: int = 1 << 31) -> int:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(name, f"a whole number from 1 to {most}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(name, "a number above 0", value)
        return float(value)

    def optional(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return bool(value)

    def wrong(self, name: str, wanted: str, value: object) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: field {name!r} must be {wanted}, not {value!r}.")


def model_config(arch: Architecture, values: Mapping[str, Any], *, eos_token_ids: set[int], where: str) -> ModelConfig:
    """From config.json fields. `eos_token_ids`: end tokens found elsewhere, joined with the config's own. Raises ModelLoadError."""
    fields = _Fields(values, arch.defaults, where)
    for name in ("quantization_config", "use_bidirectional_attention"):
        if values.get(name):
            raise ModelLoadError(f"{where}: {name!r} is not supported; fetch the unquantised model or a GGUF file of it.")
    num_layers = fields.count("num_hidden_layers", most=4096)
    num_heads = fields.count("num_attention_heads", most=1 << 16)
    num_kv_heads = fields.count("num_key_value_heads", num_heads, most=1 << 16)
    hidden_size = fields.count("hidden_size", most=1 << 20)
    head_dim = fields.count("head_dim", hidden_size // num_heads, most=1 << 16)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"{where}: {num_heads} query heads can't share {num_kv_heads} key/value heads evenly.")
    max_position = fields.count("max_position_embeddings")
    nope = _layers_without_rope(fields, num_layers)
    layer_types = _layer_types(arch, fields, num_layers, nope)
    window = fields.count("sliding_window") if _SLIDING in layer_types else None
    by_type = _ropes(arch, fields, set(layer_types), head_dim, max_position)
    activation = fields.get("hidden_activation") or fields.get("hidden_act")
    if activation not in ACTIVATIONS:
        raise ModelLoadError(f"{where}: activation {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}.")
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ModelLoadError(f"{where}: dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}.")
    attention_bias = fields.flag("attention_bias") if arch.attention_bias == "config" else False
    vocab_size = fields.count("vocab_size", most=1 << 26)
    eos = eos_token_ids | _token_ids(fields, "eos_token_id", vocab_size)
    if any(token_id >= vocab_size for token_id in eos):
        raise ModelLoadError(f"{where}: end token {max(eos)} is not in a vocabulary of {vocab_size} tokens.")
    return ModelConfig(
        architecture=arch.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", most=1 << 24),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_serving_limit(by_type.get(_FULL) or next(iter(by_type.values())), max_position),
        rms_norm_eps=fields.number("rms_norm_eps"),
        activation=activation,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        torch_dtype=DTYPES[dtype],
        pre_norm=arch.pre_norm,
        post_norm=arch.post_norm,
        qk_norm=arch.qk_norm,
        qkv_bias=attention_bias or arch.attention_bias == "qkv",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
        embedding_scale=math.sqrt(hidden_size) if arch.scaled_embeddings else 1.0,
        attention_scale=fields.number("query_pre_attn_scalar", head_dim) ** -0.5,
        attention_softcap=fields.optional("attn_logit_softcapping"),
        logit_softcap=fields.optional("final_logit_softcapping"),
        sliding_windows=tuple(window if kind == _SLIDING else None for kind in layer_types),
        ropes=tuple(None if nope[i] else by_type[kind] for i, kind in enumerate(layer_types)),
        eos_token_ids=tuple(sorted(eos)),
        bos_token_id=min(_token_ids(fields, "bos_token_id", vocab_size), default=None),
    )


def token_ids(value: object, *, name: str, where: str) -> set[int]:
    """An id, a list of ids or null. Raises ModelLoadError."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in values):
        raise ModelLoadError(f"{where}: field {name!r} must be a token id or a list of them, not {value!r}.")
    return set(values)


def _token_ids(fields: _Fields, name: str, vocab_size: int) -> set[int]:
    ids = token_ids(fields.get(name), name=name, where=fields.where)
    if name not in fields.values:  # a default of the family says nothing about a vocabulary that is smaller than the family's
        return {token_id for token_id in ids if token_id < vocab_size}
    if any(token_id >= vocab_size for token_id in ids):
        raise fields.wrong(name, f"below the vocabulary's size ({vocab_size})", fields.get(name))
    return ids


def _layers_without_rope(fields: _Fields, num_layers: int) -> list[bool]:
    listed = fields.get("no_rope_layers")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) < num_layers:
            raise fields.wrong("no_rope_layers", f"a list of {num_layers} zeros and ones", listed)
        return [not has_rope for has_rope in listed[:num_layers]]
    interval = fields.get("no_rope_layer_interval")
    return [interval is not None and (i + 1) % fields.count("no_rope_layer_interval") == 0 for i in range(num_layers)]


def _layer_types(arch: Architecture, fields: _Fields, num_layers: int, nope: list[bool]) -> list[str]:
    listed = fields.get("layer_types")
    if listed is not None and arch.windows in ("upper", "pattern", "nope"):
        if not isinstance(listed, list) or len(listed) != num_layers or not set(listed) <= {_SLIDING, _FULL}:
            raise fields.wrong("layer_types", f"a list of {num_layers} of {_SLIDING!r} and {_FULL!r}", listed)
        return listed if arch.windows != "nope" or fields.flag("use_sliding_window") else [_FULL] * num_layers
    if fields.get("sliding_window") is None or arch.windows == "none":
        slides = [False] * num_layers
    elif arch.windows == "all":
        slides = [True] * num_layers
    elif arch.windows == "pattern":
        period = fields.count("sliding_window_pattern")
        slides = [(i + 1) % period != 0 for i in range(num_layers)]
    elif not fields.flag("use_sliding_window"):
        slides = [False] * num_layers
    elif arch.windows == "nope":
        slides = nope
    else:
        first = fields.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.wrong("max_window_layers", "a whole number", first)
        slides = [i >= first for i in range(num_layers)]
    return [_SLIDING if slide else _FULL for slide in slides]


def _ropes(arch: Architecture, fields: _Fields, layer_types: set[str], head_dim: int, max_position: int) -> dict[str, RopeConfig]:
    """Layer type -> rotation. Both forms are read: `rope_parameters` (one, or one per layer type) and `rope_theta` + `rope_scaling`."""
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if value is not None and not isinstance(value, dict):
            raise fields.wrong(name, "an object or null", value)
    theta = fields.number("rope_theta")
    original = fields.get("original_max_position_embeddings")

    def rope(given: Mapping[str, Any], theta: float) -> RopeConfig:
        given = {"partial_rotary_factor": fields.get("partial_rotary_factor")} | dict(given)
        if arch.model_type == "phi3" and (given.get("rope_type") or given.get("type")) in ("su", "yarn"):
            given["rope_type"] = "longrope"  # what this family means by these older names
        limit = None if original is None else fields.count("original_max_position_embeddings")
        return parse_rope(given, theta=theta, head_dim=head_dim, max_position=max_position, original_max_position=limit)

    try:
        local_theta = fields.get("rope_local_base_freq")
        if parameters and any(isinstance(parameters.get(kind), dict) for kind in (_SLIDING, _FULL)):
            thetas = {_SLIDING: theta if local_theta is None else fields.number("rope_local_base_freq"), _FULL: theta}
            return {kind: rope(parameters.get(kind) or {}, thetas[kind]) for kind in layer_types}
        full = rope(scaling or parameters or {}, theta)
        if local_theta is None:
            return dict.fromkeys(layer_types, full)
        return {kind: full if kind == _FULL else rope({}, fields.number("rope_local_base_freq")) for kind in layer_types}
    except ModelLoadError as error:
        raise ModelLoadError(f"{fields.where}: {error}") from error


def _serving_limit(rope: RopeConfig, max_position: int) -> int:
    """dynamic and yarn stretch a context that the config may give unstretched; the other kinds' configs give the stretched one."""
    if rope.kind in ("dynamic", "yarn"):
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position
