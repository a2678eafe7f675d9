"""Tiny random models of transformers, one config per architecture and per kind of RoPE scaling."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.models.decoder import Decoder
from headrace.models.loader import load_model

VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}

# name -> (config class, changes)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "llama-gelu": ("LlamaConfig", {"hidden_act": "gelu", "num_key_value_heads": 6}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", {}),
    "smollm3-window": ("SmolLM3Config", {"use_sliding_window": True, "sliding_window": 6}),
    "olmo2": ("Olmo2Config", {}),
    "olmo2-bias": ("Olmo2Config", {"attention_bias": True}),
    "phi3": ("Phi3Config", {"sliding_window": 11}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "num_hidden_layers": 7}),
}

_LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 4.0, 9.0]}
# name -> (config class, changes); the scalings start at a length of 32, so that a prompt of 50 is over it
TINY_ROPE: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}),
    "dynamic": ("LlamaConfig", {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}}),
    "llama3": (
        "LlamaConfig",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 5e5,
            },
        },
    ),
    "yarn": (
        "Qwen3Config",
        {"head_dim": 32, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}},
    ),
    "yarn-mscale": (
        "LlamaConfig",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            },
        },
    ),
    "longrope": (
        "Phi3Config",
        {"original_max_position_embeddings": 32, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_LONGROPE}},
    ),
    "partial": ("Phi3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gemma3-linear": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
}


def make(class_name: str, changes: dict[str, Any], *, seed: int = 0) -> transformers.PreTrainedModel:
    """A random float32 model with lively norms and biases (transformers starts them at 1 and 0, which would hide mistakes)."""
    torch.manual_seed(seed)
    config = getattr(transformers, class_name)(**(_SIZES | changes))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_and_load(theirs: transformers.PreTrainedModel, path: Path, *, dtype: torch.dtype = torch.float32, kernels: bool = False) -> Decoder:
    theirs.save_pretrained(path)
    return load_model(str(path), dtype=dtype, device=torch.device("cpu"), kernels=kernels)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def their_logits(theirs: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return theirs(torch.tensor([tokens])).logits[0].float()


def their_greedy(theirs: transformers.PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """Token by token over their cache. (`generate` would hide the end token, and computes the whole text anew where longrope switches.)"""
    cache, out, step = transformers.DynamicCache(config=theirs.config), [], tokens
    name = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "past_key_values"  # it was renamed in 5.x
    with torch.inference_mode():
        while len(out) < count:
            step = [int(theirs(torch.tensor([step]), use_cache=True, **{name: cache}).logits[0, -1].argmax())]
            out += step
    return out
