"""Models from GGUF files: every architecture, every block format, scalings, and what is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from headrace.errors import ModelLoadError
from headrace.models.loader import load_config, load_model
from tests.models.gguf_writer import dequantized_state, write_gguf
from tests.models.paged_driver import PagedDriver
from tests.models.test_gguf_blocks import SCALE_OFFSETS, random_blocks
from tests.models.tiny_models import TINY, TINY_ROPE, make, prompt, their_logits

TOKENS = prompt(25)
CPU = torch.device("cpu")

# GGUF architecture -> (config class, changes, metadata). What a file can't say (which layers slide) is at its family's rule.
CASES = {
    "llama": ("LlamaConfig", {}, {}),
    "llama-tied-bias": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 16}, {}),
    "qwen2": ("Qwen2Config", {}, {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, {}),
    "smollm3": ("SmolLM3Config", {}, {}),
    "olmo2": ("Olmo2Config", {}, {}),
    "phi3": ("Phi3Config", {"sliding_window": 11}, {"attention.sliding_window": 11}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "attn_logit_softcapping": 3.0},
        {"attention.sliding_window": 8, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        TINY_ROPE["gemma3-linear"][1] | {"query_pre_attn_scalar": 16},
        {"attention.sliding_window": 20, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
}


def load(path):
    return load_model(str(path), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name, tmp_path):
    class_name, changes, metadata = CASES[name]
    theirs = make(class_name, changes)
    path = tmp_path / "model.gguf"
    write_gguf(theirs, path, name.split("-")[0], metadata=metadata)
    ours = load(path)
    assert (PagedDriver(ours).prefill(TOKENS) - their_logits(theirs, TOKENS)).abs().max() < 1e-4
    assert (ours.config.bos_token_id, ours.config.eos_token_ids) == (1, (2,))
    assert ours.config.max_position_embeddings == theirs.config.max_position_embeddings


@pytest.mark.parametrize("name", [*SCALE_OFFSETS, "F16", "BF16"])
def test_each_format_in_a_llama(name, tmp_path):
    """Logits equal transformers' on the weights that the gguf package reads from the same file."""
    theirs = make("LlamaConfig", {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 32})
    path = tmp_path / "model.gguf"
    blocks = None
    if name.endswith("_K"):  # the package can read these but not make them: random blocks of the right shape in one matrix a layer
        size = next(t for t in gguf.GGMLQuantizationType if t.name == name)
        row_bytes = gguf.GGML_QUANT_SIZES[size][1]
        blocks = {f"blk.{i}.ffn_down.weight": tame(name, random_blocks(name, 256, seed=i).reshape(256, row_bytes)) for i in range(2)}
    write_gguf(theirs, path, "llama", quantization=name, blocks=blocks)
    theirs.load_state_dict(dequantized_state(path, theirs, "llama"))
    assert (PagedDriver(load(path)).prefill(TOKENS) - their_logits(theirs, TOKENS)).abs().max() < 1e-4


def tame(name, blocks):
    """Scales small enough for a model to stay in range."""
    for offset in SCALE_OFFSETS[name]:
        blocks[:, offset : offset + 2] = np.full(len(blocks), 1e-4, np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


def test_llama3_scaling_comes_as_divisors_of_the_frequencies(tmp_path):
    theirs = make(*TINY_ROPE["llama3"])
    plain = make("LlamaConfig", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    plain.load_state_dict(theirs.state_dict())
    divisors = (plain.model.rotary_emb.inv_freq / theirs.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 2
    path = tmp_path / "model.gguf"
    write_gguf(theirs, path, "llama", extra={"rope_freqs.weight": divisors})
    assert (PagedDriver(load(path)).prefill(TOKENS) - their_logits(theirs, TOKENS)).abs().max() < 1e-4
    write_gguf(theirs, path, "llama", extra={"rope_freqs.weight": divisors[:-1]})
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        load(path)


def test_yarn(tmp_path):
    theirs = make(*TINY_ROPE["yarn"])
    path = tmp_path / "model.gguf"
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    write_gguf(theirs, path, "qwen3", metadata=scaling)
    tokens = prompt(50)
    assert (PagedDriver(load(path)).prefill(tokens) - their_logits(theirs, tokens)).abs().max() < 1e-4


def test_longrope(tmp_path):
    theirs = make(*TINY_ROPE["longrope"])
    rope = theirs.config.rope_parameters
    path = tmp_path / "model.gguf"
    factors = {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("short", "long")}
    metadata = {
        "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": float(theirs.model.rotary_emb.attention_scaling),
        "attention.sliding_window": 0,
    }
    write_gguf(theirs, path, "phi3", metadata=metadata, extra=factors)
    for length in (20, 50):
        tokens = prompt(length)
        assert (PagedDriver(load(path)).prefill(tokens) - their_logits(theirs, tokens)).abs().max() < 1e-4


def test_every_end_token_counts(tmp_path):
    path = tmp_path / "model.gguf"
    more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    write_gguf(make(*TINY["llama"]), path, "llama", metadata=more)
    assert load_config(str(path)).eos_token_ids == (2, 5, 7)
    write_gguf(make(*TINY["llama"]), path, "llama", metadata={"tokenizer.ggml.eot_token_id": 96})
    with pytest.raises(ModelLoadError, match=r"eos_token_id.*96"):
        load(path)


def test_a_directory_with_one_gguf_file(tmp_path):
    write_gguf(make(*TINY["llama"]), tmp_path / "a.gguf", "llama")
    assert load(tmp_path).config.architecture == "llama"
    write_gguf(make(*TINY["llama"]), tmp_path / "b.gguf", "llama")
    with pytest.raises(ModelLoadError, match=r"a\.gguf, b\.gguf"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("arch", "options", "named"),
    [
        ("gpt2", {}, "'gpt2'.*llama.*qwen3"),
        ("llama", {"extra": {"blk.0.surprise.weight": np.zeros(4, np.float32)}}, r"blk\.0\.surprise\.weight"),
        ("llama", {"metadata": {"rope.scaling.type": "spiral"}}, "spiral"),
        ("llama", {"metadata": {"split.count": 2}}, "merge"),
    ],
)
def test_what_is_refused_is_named(arch, options, named, tmp_path):
    theirs = make(*TINY["llama"])
    path = tmp_path / "model.gguf"
    if arch == "gpt2":
        writer = gguf.GGUFWriter(path, arch)
        writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        write_gguf(theirs, path, arch, **options)
    with pytest.raises(ModelLoadError, match=named) as error:
        load(path)
    assert "model.gguf" in str(error.value)


def test_an_unknown_format_names_tensor_and_type(tmp_path):
    path = tmp_path / "model.gguf"
    theirs = make("LlamaConfig", {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 1})
    blocks = np.zeros((256, 136), np.uint8)
    write_gguf(theirs, path, "llama", quantization="IQ4_XS", blocks={"blk.0.ffn_down.weight": blocks})
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_down\.weight.*IQ4_XS"):
        load(path)
