"""Each RoPE scaling against transformers', for prompts under and over the length where scaling starts; and how configs write them."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from headrace.errors import ModelLoadError
from headrace.models.loader import load_config
from headrace.models.rope import TABLE_POSITIONS, RopeConfig, RotaryEmbedding, parse_rope
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import TINY, TINY_ROPE, make, prompt, save_and_load, their_greedy, their_logits


@pytest.mark.parametrize("name", TINY_ROPE)
def test_equals_transformers(name, tmp_path):
    theirs = make(*TINY_ROPE[name])
    ours = save_and_load(theirs, tmp_path)
    for length in (20, 32, 50):
        tokens = prompt(length)
        want = their_logits(theirs, tokens)
        for chunks in ([length], [7, 1, length - 8]):
            got = PagedDriver(ours).prefill(tokens, chunks=chunks)
            assert (got - want).abs().max() < 1e-4, (length, chunks)
    tokens = prompt(26)  # generation crosses the border
    assert PagedDriver(ours).greedy(tokens, 14) == their_greedy(theirs, tokens, 14)


def test_scaling_changes_the_logits(tmp_path):
    plain = their_logits(make("LlamaConfig", {}), prompt(50))
    for name in ("linear", "dynamic"):
        assert (their_logits(make(*TINY_ROPE[name]), prompt(50)) - plain).abs().max() > 1e-2


def _config_with(tmp_path, theirs, **changes):
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("rope_parameters")
    path.write_text(json.dumps(fields | changes))
    return load_config(str(tmp_path))


def test_both_forms_neither_and_their_precedence(tmp_path):
    theirs = make(*TINY["llama"])
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

    def rope(**changes) -> RopeConfig:
        (only,) = set(_config_with(tmp_path, theirs, **changes).ropes)
        return only

    assert rope().theta == 10000.0
    assert rope(rope_theta=5.0).theta == 5.0
    assert rope(rope_theta=5.0, rope_scaling=None).kind == "default"
    old = rope(rope_theta=5.0, rope_scaling={"rope_type": "llama3", **llama3})
    assert old == rope(rope_theta=5.0, rope_scaling={"type": "llama3", **llama3})
    assert old == rope(rope_parameters={"rope_type": "llama3", "rope_theta": 5.0, **llama3})
    assert old == rope(rope_theta=7.0, rope_parameters={"rope_type": "llama3", "rope_theta": 5.0, **llama3})
    assert old.original_max_position == 64
    assert rope(rope_scaling={"rope_type": "llama3", **llama3}, original_max_position_embeddings=128).original_max_position == 128


def test_gemma3_in_both_forms(tmp_path):
    theirs = make(*TINY["gemma3"])
    nested = _config_with(
        tmp_path,
        theirs,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {"rope_type": "linear", "factor": 8.0}},
    )
    flat = _config_with(tmp_path, theirs, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert nested.ropes == flat.ropes
    assert [rope.theta for rope in flat.ropes] == [1e4] * 5 + [1e6, 1e4]
    assert [rope.factor for rope in flat.ropes] == [1.0] * 5 + [8.0, 1.0]
    assert flat.sliding_windows == (8, 8, 8, 8, 8, None, 8)


def test_stretched_contexts_are_served_to_their_end(tmp_path):
    theirs = make(*TINY["llama"])
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert _config_with(tmp_path, theirs, rope_scaling=yarn).max_position_embeddings == 1024
    assert _config_with(tmp_path, theirs, rope_scaling={"type": "dynamic", "factor": 2.0}).max_position_embeddings == 512
    assert _config_with(tmp_path, theirs, rope_scaling={"type": "linear", "factor": 2.0}).max_position_embeddings == 256


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_theta": float("nan")}, "rope_theta"),
    ],
)
def test_wrong_scalings_are_load_errors_that_name_the_field(fields, named):
    with pytest.raises(ModelLoadError, match=named):
        parse_rope(fields, theta=1e4, head_dim=16, max_position=64, original_max_position=None)


def test_a_wrong_scaling_names_the_file(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json.*spiral"):
        _config_with(tmp_path, make(*TINY["llama"]), rope_scaling={"type": "spiral", "factor": 2.0})


def test_lengths_are_taken_per_row(tmp_path):
    """A long batch mate must not switch a short row to the long frequencies."""
    theirs = make(*TINY_ROPE["longrope"])
    ours = save_and_load(theirs, tmp_path)
    short, long = prompt(20), prompt(50, seed=2)
    logits = PagedDriver(ours).step({0: short, 1: long})
    assert (logits[0] - their_logits(theirs, short)).abs().max() < 1e-4
    assert (logits[1] - their_logits(theirs, long)).abs().max() < 1e-4
    assert torch.isfinite(logits[0]).all()


def test_kept_rotations_are_those_of_each_position():
    embedding = RotaryEmbedding(RopeConfig(kind="default", theta=10_000.0, rotary_dim=64), torch.device("cpu"))
    with torch.inference_mode():
        few = embedding.cos_sin(torch.tensor([3, 0, 700]), None, torch.float32)
        far = embedding.cos_sin(torch.tensor([TABLE_POSITIONS - 1, 700, 3]), None, torch.float32)
        beyond = embedding.cos_sin(torch.tensor([3, TABLE_POSITIONS, TABLE_POSITIONS - 1]), None, torch.float32)
    for now, grown, computed in zip(few, far, beyond, strict=True):
        assert now.shape == computed.shape == (3, 1, 64)
        assert torch.equal(now[[0, 2]], grown[[2, 1]])
        torch.testing.assert_close(torch.stack((now[0], grown[0])), computed[[0, 2]], rtol=0, atol=2e-7)
    assert [len(table) for table in embedding._tables[torch.float32]] == [TABLE_POSITIONS] * 2
    assert not embedding._tables[torch.float32][0].is_inference()
    assert embedding.cos_sin(torch.tensor([], dtype=torch.int64), None, torch.float32)[0].shape == (0, 1, 64)
    assert embedding.cos_sin(torch.tensor([5]), None, torch.bfloat16)[1].dtype == torch.bfloat16
    assert copy.deepcopy(embedding)._tables == {}
