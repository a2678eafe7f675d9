"""Writes a transformers model as a GGUF file the way converters do, with the `gguf` package's own names and quantisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers


def _paired(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Llama converters put the two halves of a head's rows side by side."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    arch: str,
    *,
    quantization: str = "F32",
    blocks: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """`quantization`: of the matrices that its blocks fit. `blocks`: tensor name -> packed bytes [rows, bytes], as `quantization`
    has them. `metadata`: more keys, ints and floats and strings. `extra`: more float32 tensors."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    kind = gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key if "." in key and key.split(".")[0] in ("tokenizer", "general", "split") else f"{arch}.{key}", value)
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            values = _paired(values, heads if "q_proj" in name else kv_heads)
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1
        stem, _, leaf = name.rpartition(".")
        target = f"{names.get_name(stem)}.{leaf}"
        if blocks and target in blocks:
            writer.add_tensor(target, blocks[target], raw_dtype=kind)
        elif values.ndim == 2 and quantization != "F32" and not blocks:
            writer.add_tensor(target, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantized_state(path: Path, model: transformers.PreTrainedModel, arch: str) -> dict[str, torch.Tensor]:
    """The file's weights as the `gguf` package reads them, in the names and order of `model`'s state dict."""
    config = model.config
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), config.num_hidden_layers)
    theirs = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    state = {}
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        values = theirs.get(f"{names.get_name(stem)}.{leaf}")
        if values is None:  # a tied head
            values = theirs["token_embd.weight"]
        values = values.reshape(tensor.shape)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        state[name] = torch.from_numpy(np.array(values))
    return state
