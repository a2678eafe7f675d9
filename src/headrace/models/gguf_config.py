"""GGUF metadata in the words of config.json, so that one parser makes every ModelConfig."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from headrace.errors import ModelLoadError
from headrace.models.gguf import GGUFFile
from headrace.models.model_config import ModelConfig, model_config
from headrace.models.registry import Architecture, find_gguf_architecture

_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

# config.json field -> metadata key within the architecture's section
_SCALAR_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

# models whose queries are scaled by the width of a head counted from the hidden size: (architecture, layers) of their largest size
_SCALED_BY_HIDDEN_SIZE = {("gemma2", 46), ("gemma3", 62)}


def gguf_model_config(file: GGUFFile) -> tuple[Architecture, ModelConfig]:
    """Raises ModelLoadError, which names the file."""
    where = str(file.path)
    arch = find_gguf_architecture(file.metadata.get("general.architecture"), where=where)
    prefix = f"{arch.gguf_name}."
    section = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{where}: tensor 'token_embd.weight' is missing or not a matrix.")
    fields: dict[str, Any] = {name: section[key] for name, key in _SCALAR_KEYS.items() if key in section}
    if isinstance(fields.get("num_key_value_heads"), list) or isinstance(fields.get("intermediate_size"), list):
        raise ModelLoadError(f"{where}: layers of different sizes (lists in head_count_kv or feed_forward_length) are not supported.")
    if fields.get("sliding_window") == 0:
        del fields["sliding_window"]
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"):
        if name not in fields:
            raise ModelLoadError(f"{where}: metadata {arch.gguf_name}.{_SCALAR_KEYS[name]} is missing.")
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    head_dim = fields.setdefault("head_dim", hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else 0)
    fields.setdefault("num_key_value_heads", heads)
    fields["vocab_size"] = embedding.shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    fields["attention_bias"] = arch.attention_bias == "config" and "blk.0.attn_q.bias" in file.tensors
    fields["bos_token_id"] = file.metadata.get("tokenizer.ggml.bos_token_id")
    fields["eos_token_id"] = [file.metadata[key] for key in _END_TOKENS if key in file.metadata]
    fields["dtype"] = _checkpoint_dtype(file)
    fields["rope_scaling"] = _rope_scaling(arch, section, file, head_dim)
    if arch.windows in ("upper", "nope"):
        fields.pop("sliding_window", None)  # these files never say which layers slide
    if (arch.gguf_name, fields["num_hidden_layers"]) in _SCALED_BY_HIDDEN_SIZE:
        fields["query_pre_attn_scalar"] = hidden // heads
    elif arch.scaled_embeddings:
        fields["query_pre_attn_scalar"] = head_dim
    config = model_config(arch, fields, eos_token_ids=set(), where=where)
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None:
        values = tuple(file.dequantize("rope_freqs.weight").tolist())
        if any(rope is not None and len(values) != rope.rotary_dim // 2 for rope in config.ropes) or not all(value > 0 for value in values):
            raise ModelLoadError(f"{where}: tensor 'rope_freqs.weight' must hold {head_dim // 2} numbers above 0.")
        ropes = tuple(None if rope is None else dataclasses.replace(rope, frequency_divisors=values) for rope in config.ropes)
        config = dataclasses.replace(config, ropes=ropes)
    return arch, config


def _checkpoint_dtype(file: GGUFFile) -> str:
    """Of the matrices; quantised ones were mostly bfloat16 before."""
    kinds = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F32", "F64"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else "bfloat16"


def _rope_scaling(arch: Architecture, section: dict[str, Any], file: GGUFFile, head_dim: int) -> dict[str, Any]:
    kind = section.get("rope.scaling.type", "none")
    scaling: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    for name, key in (
        ("factor", "rope.scaling.factor"),
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ):
        if key in section:
            scaling[name] = section[key]
    rotated = section.get("rope.dimension_count")
    if isinstance(rotated, int) and head_dim:
        scaling["partial_rotary_factor"] = rotated / head_dim
    long_name, short_name = "rope_factors_long.weight", "rope_factors_short.weight"
    if long_name in file.tensors and short_name in file.tensors:
        scaling |= {"rope_type": "longrope", "long_factor": file.dequantize(long_name).tolist(), "short_factor": file.dequantize(short_name).tolist()}
    amplitude = section.get("rope.scaling.attn_factor")
    if isinstance(amplitude, float):
        scaling["attention_factor"] = amplitude
        if scaling["rope_type"] == "yarn" and scaling.get("factor", 1.0) > 1.0:
            scaling["attention_factor"] = amplitude * (1 + 0.1 * math.log(scaling["factor"]))
    return scaling
