"""transformers' own model of a Llama GGUF file, for the tests that compare whole answers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from headrace.models.gguf import GGUFFile
from tests.models.gguf_writer import dequantized_state


def transformers_model(path: Path) -> transformers.LlamaForCausalLM:
    """fp32, with the weights as the `gguf` package dequantises them."""
    meta = GGUFFile(path).metadata
    config = transformers.LlamaConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        max_position_embeddings=meta["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict(dequantized_state(path, model, "llama"))
    return model
