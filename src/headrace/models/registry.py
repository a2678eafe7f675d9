"""The supported architectures, one row each: how config.json and GGUF name them, what their config assumes where it is silent,
what sets them apart, and how their checkpoints name the weights.

A name table maps a module of `models.decoder` to the checkpoint's tensors that are stacked into it ("{}" is the layer). It never grows
code: an architecture that needs more than the traits below belongs in a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import ModelLoadError

NameTable = Mapping[str, tuple[str, ...]]

# which layers slide: none; all; those from max_window_layers on; all but every n-th; those without RoPE
WindowRule = Literal["none", "all", "upper", "pattern", "nope"]
# which linear layers have a bias: as config's attention_bias says, q/k/v only, or none
BiasRule = Literal["config", "qkv", "none"]


def _hf_names(**changes: tuple[str, ...]) -> NameTable:
    """The names most architectures share; `changes`: part of a layer -> tensors within "model.layers.{}."."""
    parts: dict[str, tuple[str, ...]] = {
        "attention_pre_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        "attention.output": ("self_attn.o_proj",),
        "mlp_pre_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }
    parts |= {name.replace("__", "."): tensors for name, tensors in changes.items()}
    table = {f"layers.{{}}.{part}": tuple(f"model.layers.{{}}.{tensor}" for tensor in tensors) for part, tensors in parts.items()}
    return table | {"embed_tokens": ("model.embed_tokens",), "final_norm": ("model.norm",), "lm_head": ("lm_head",)}


def _gguf_names(**changes: tuple[str, ...]) -> NameTable:
    parts: dict[str, tuple[str, ...]] = {
        "attention_pre_norm": ("attn_norm",),
        "attention.qkv": ("attn_q", "attn_k", "attn_v"),
        "attention.q_norm": ("attn_q_norm",),
        "attention.k_norm": ("attn_k_norm",),
        "attention.output": ("attn_output",),
        "attention_post_norm": ("post_attention_norm",),
        "mlp_pre_norm": ("ffn_norm",),
        "mlp.gate_up": ("ffn_gate", "ffn_up"),
        "mlp.down": ("ffn_down",),
        "mlp_post_norm": ("post_ffw_norm",),
    }
    parts |= {name.replace("__", "."): tensors for name, tensors in changes.items()}
    table = {f"layers.{{}}.{part}": tuple(f"blk.{{}}.{tensor}" for tensor in tensors) for part, tensors in parts.items()}
    return table | {"embed_tokens": ("token_embd",), "final_norm": ("output_norm",), "lm_head": ("output",)}


_GEMMA_NAMES = _hf_names(
    attention_post_norm=("post_attention_layernorm",),
    mlp_pre_norm=("pre_feedforward_layernorm",),
    mlp_post_norm=("post_feedforward_layernorm",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    model_type: str  # in config.json
    class_names: tuple[str, ...]  # config.json's "architectures"
    defaults: Mapping[str, Any]  # config.json's fields that the family's config class fills in
    gguf_name: str | None = None  # general.architecture; None: its GGUF files go by another row's name
    hf_names: NameTable = field(default_factory=_hf_names)
    gguf_names: NameTable = field(default_factory=_gguf_names)
    gguf_permuted: bool = False  # its GGUF files hold q and k rows with the pairs of a rotation side by side
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: float = 0.0  # added to norm weights of Hugging Face checkpoints
    qk_norm: Literal["head", "full"] | None = None  # one norm per head, or over the whole width
    attention_bias: BiasRule = "none"
    windows: WindowRule = "none"
    scaled_embeddings: bool = False  # by sqrt(hidden_size)


_SHARED: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GEMMA: dict[str, Any] = _SHARED | {
    "vocab_size": 256000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        model_type="llama",  # Llama 2 and 3, SmolLM 1 and 2, and the many models that share their shape
        class_names=("LlamaForCausalLM",),
        gguf_name="llama",
        defaults=_SHARED | {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        gguf_permuted=True,
        attention_bias="config",
    ),
    Architecture(
        model_type="mistral",
        class_names=("MistralForCausalLM",),
        defaults=_SHARED
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
        windows="all",
    ),
    Architecture(
        model_type="qwen2",
        class_names=("Qwen2ForCausalLM",),
        gguf_name="qwen2",
        defaults=_SHARED | {"max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        attention_bias="qkv",
        windows="upper",
    ),
    Architecture(
        model_type="qwen3",
        class_names=("Qwen3ForCausalLM",),
        gguf_name="qwen3",
        defaults=_SHARED
        | {
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        qk_norm="head",
        attention_bias="config",
        windows="upper",
    ),
    Architecture(
        model_type="smollm3",
        class_names=("SmolLM3ForCausalLM",),
        gguf_name="smollm3",
        defaults=_SHARED
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        gguf_permuted=True,
        attention_bias="config",
        windows="nope",
    ),
    Architecture(
        model_type="olmo2",
        class_names=("Olmo2ForCausalLM",),
        gguf_name="olmo2",
        defaults=_SHARED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50279},
        hf_names=_hf_names(attention_post_norm=("post_attention_layernorm",), mlp_post_norm=("post_feedforward_layernorm",)),
        pre_norm=False,
        post_norm=True,
        qk_norm="full",
        attention_bias="config",
    ),
    Architecture(
        model_type="phi3",
        class_names=("Phi3ForCausalLM",),
        gguf_name="phi3",
        defaults=_SHARED
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000},
        hf_names=_hf_names(attention__qkv=("self_attn.qkv_proj",), mlp__gate_up=("mlp.gate_up_proj",)),
        gguf_names=_gguf_names(attention__qkv=("attn_qkv",), mlp__gate_up=("ffn_up",)),
        windows="all",
    ),
    Architecture(
        model_type="gemma2",
        class_names=("Gemma2ForCausalLM",),
        gguf_name="gemma2",
        defaults=_GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        hf_names=_GEMMA_NAMES,
        post_norm=True,
        norm_offset=1.0,
        attention_bias="config",
        windows="pattern",
        scaled_embeddings=True,
    ),
    Architecture(
        model_type="gemma3_text",
        class_names=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        gguf_name="gemma3",
        defaults=_GEMMA
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
        },
        hf_names=_GEMMA_NAMES,
        post_norm=True,
        norm_offset=1.0,
        qk_norm="head",
        attention_bias="config",
        windows="pattern",
        scaled_embeddings=True,
    ),
)


def find_architecture(*, class_names: list[str], model_type: str | None, where: str) -> Architecture:
    """The row for a config.json, by class name first. Raises ModelLoadError that lists what is supported."""
    for row in ARCHITECTURES:
        if any(name in row.class_names for name in class_names):
            return row
    if not class_names:
        for row in ARCHITECTURES:
            if row.model_type == model_type:
                return row
    supported = ", ".join(name for row in ARCHITECTURES for name in row.class_names)
    raise ModelLoadError(f"{where}: architecture {', '.join(class_names) or model_type!r} is not supported; supported are {supported}.")


def find_gguf_architecture(name: object, *, where: str) -> Architecture:
    for row in ARCHITECTURES:
        if row.gguf_name is not None and row.gguf_name == name:
            return row
    supported = ", ".join(row.gguf_name for row in ARCHITECTURES if row.gguf_name is not None)
    raise ModelLoadError(f"{where}: GGUF architecture {name!r} is not supported; supported are {supported}.")
