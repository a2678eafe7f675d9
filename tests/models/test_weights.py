"""Strict loading of Hugging Face directories: what is missing, unknown, torn, pickled or of a wrong shape is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.errors import ModelLoadError
from headrace.models.loader import load_config, load_model, weight_bytes
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import TINY, make, prompt, save_and_load, their_logits

CPU = torch.device("cpu")
TOKENS = prompt(12)


def load(path):
    return load_model(str(path), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    theirs = make(*TINY["llama"])
    path = tmp_path_factory.mktemp("tiny")
    theirs.save_pretrained(path)
    return theirs, path


@pytest.fixture
def copy(tiny, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny[1], path)
    return path


def edit_config(path, **changes):
    file = path / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def edit_weights(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_sharded_checkpoints_give_the_same_model(tiny, tmp_path):
    theirs, _ = tiny
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    got = PagedDriver(load(tmp_path)).prefill(TOKENS)
    assert (got - their_logits(theirs, TOKENS)).abs().max() < 1e-4


def test_a_missing_shard_is_named(tiny, tmp_path):
    tiny[0].save_pretrained(tmp_path, max_shard_size="40KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelLoadError, match=victim.name):
        load(tmp_path)


def test_an_index_cannot_point_outside_the_directory(copy):
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model/model.safetensors"}}))
    with pytest.raises(ModelLoadError, match="outside"):
        load(copy)


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.5, 0.999])
def test_torn_files_are_named(copy, share):
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(copy)


def test_missing_and_unknown_tensors_are_named(copy):
    edit_weights(copy, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"missing: model\.layers\.2\.mlp\.up_proj\.weight\."):
        load(copy)


def test_unknown_tensors_are_named(copy):
    edit_weights(copy, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(ModelLoadError, match=r"not part of this architecture: model\.layers\.0\.self_attn\.q_proj\.bias\."):
        load(copy)


def test_many_names_are_cut(copy):
    edit_config(copy, num_hidden_layers=9)
    with pytest.raises(ModelLoadError, match="and 37 more"):
        load(copy)


def test_old_buffers_and_copies_of_tied_weights_are_tolerated(tmp_path):
    theirs = make(*TINY["qwen3"])
    theirs.save_pretrained(tmp_path)

    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit_weights(tmp_path, change)
    got = PagedDriver(load(tmp_path)).prefill(TOKENS)
    assert (got - their_logits(theirs, TOKENS)).abs().max() < 1e-4


def test_an_untied_model_needs_its_head(copy):
    edit_weights(copy, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        load(copy)


@pytest.mark.parametrize("changes", [{"intermediate_size": 81}, {"vocab_size": 97}, {"num_key_value_heads": 3}, {"hidden_size": 54, "head_dim": 8}])
def test_shapes_that_disagree_with_the_config_are_named(copy, changes):
    edit_config(copy, **changes)
    with pytest.raises(ModelLoadError, match=r"tensor 'model.*config and weights disagree"):
        load(copy)


def test_pickled_weights_are_refused_with_the_next_step(copy):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*safetensors or GGUF"):
        load(copy)
    with pytest.raises(ModelLoadError, match="never opened"):
        load(copy / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [], "model_type": "mamba"}, "mamba"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_attention_heads": 10**9}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "6 query heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": 96}, "eos_token_id"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id"),
        ({"dtype": "int4"}, "int4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": 7}, "rope_parameters"),
    ],
)
def test_wrong_configs_name_file_and_field(copy, changes, named):
    edit_config(copy, **changes)
    with pytest.raises(ModelLoadError, match=named) as error:
        load_config(str(copy))
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_a_config_that_is_no_object_is_an_error(copy, text):
    (copy / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(copy)


def test_paths_that_are_no_model(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ModelLoadError, match=str(path)):
            load(path)


class TestEndTokens:
    """The end tokens are the union of config, generation config and tokenizer, whichever of them is there."""

    def ids(self, copy):
        return load_config(str(copy)).eos_token_ids

    def test_config_alone(self, copy):
        (copy / "generation_config.json").unlink()
        assert self.ids(copy) == (2,)
        edit_config(copy, eos_token_id=[5, 7])
        assert self.ids(copy) == (5, 7)

    def test_generation_config(self, copy):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
        assert self.ids(copy) == (2, 9, 11)
        edit_config(copy, eos_token_id=None)
        assert self.ids(copy) == (9, 11)

    def test_tokenizer(self, copy):
        settings = copy / "tokenizer_config.json"
        settings.write_text(json.dumps({"eos_token": "<end>", "added_tokens_decoder": {"13": {"content": "<end>"}}}))
        assert self.ids(copy) == (2, 13)
        settings.write_text(json.dumps({"eos_token": {"content": "<end>"}}))
        tokenizer = copy / "tokenizer.json"
        tokenizer.write_text(json.dumps({"added_tokens": [{"id": 14, "content": "<end>"}], "model": {"vocab": {}}}))
        assert self.ids(copy) == (2, 14)
        tokenizer.write_text(json.dumps({"added_tokens": [], "model": {"vocab": {"<end>": 15}}}))
        assert self.ids(copy) == (2, 15)
        tokenizer.write_text(json.dumps({"model": {"vocab": [["<a>", 0.0], ["<end>", -1.0]]}}))
        assert self.ids(copy) == (1, 2)
        tokenizer.write_text(json.dumps({"model": {"vocab": {}}}))
        with pytest.raises(ModelLoadError, match="<end>"):
            self.ids(copy)

    def test_beyond_the_vocabulary(self, copy):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 96]}))
        with pytest.raises(ModelLoadError, match="96"):
            self.ids(copy)


def test_gemma3_inside_a_model_of_several_modes(tmp_path):
    """Both layouts of names that such checkpoints come in; the image tower is left out knowingly."""
    theirs = make(*TINY["gemma3"])
    want = their_logits(theirs, TOKENS)
    theirs.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    text.pop("eos_token_id")
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [2, 5], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    weights = load_file(tmp_path / "model.safetensors")
    other = {"vision_tower.encoder.weight": torch.zeros(2), "multi_modal_projector.weight": torch.zeros(2)}
    old = {f"language_model.{name}": tensor for name, tensor in weights.items()} | other
    new = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    new |= {f"model.{name}": tensor for name, tensor in other.items()}
    for layout in (old, new):
        save_file(layout, tmp_path / "model.safetensors")
        model = load(tmp_path)
        assert model.config.eos_token_ids == (2, 5)
        assert (PagedDriver(model).prefill(TOKENS) - want).abs().max() < 1e-4


def test_dtype_and_size_of_weights(tiny):
    model = load_model(str(tiny[1]), dtype=torch.bfloat16, device=CPU)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert all(kind == (torch.float32 if "norm" in name else torch.bfloat16) for name, kind in kinds.items())
    assert model.config.torch_dtype == torch.float32
    norms = (2 * 4 + 1) * 48
    assert weight_bytes(model) == 2 * (sum(p.numel() for p in tiny[0].parameters()) - norms) + 4 * norms
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_checkpoints_in_other_dtypes_are_converted(tiny, tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny[1], dtype=torch.bfloat16)
    ours = save_and_load(theirs, tmp_path)
    assert ours.config.torch_dtype == torch.bfloat16
    assert ours.embed_tokens.weight.dtype == torch.float32
    got = PagedDriver(ours).prefill(TOKENS)
    assert (got - their_logits(theirs.float(), TOKENS)).abs().max() < 1e-4
