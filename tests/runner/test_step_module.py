"""The step that is compiled: the same numbers as the model's own, one graph without a break, weights by name and never copied."""

from __future__ import annotations

import pickle

import pytest
import torch

from headrace.models.decoder import Decoder
from headrace.runner.buckets import Bucket
from headrace.runner.step_module import StepModule, StepShape, example_inputs, materialize, skeleton
from tests.runner.tiny_packed import BLOCK_SIZE, kernels_or_skip, load_tiny, new_caches, step, write_tiny

SHAPE = StepShape(static_length=32, block_size=BLOCK_SIZE)
BUCKETS = [Bucket(kind="decode", num_tokens=4, num_rows=4), Bucket(kind="mixed", num_tokens=16, num_rows=4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    kernels_or_skip()
    return load_tiny(write_tiny(tmp_path_factory.mktemp("tiny") / "model.gguf"))


def test_the_same_numbers(model: Decoder) -> None:
    module, ours, theirs = StepModule(model, SHAPE), new_caches(model), new_caches(model)
    for rows in ([(0, 20)], [(20, 3)], [(0, 7), (23, 1)]):  # the first twenty positions are the prompt's
        ids, meta = step(rows)
        with torch.inference_mode():
            places = (meta.positions_T, meta.slot_mapping_T, meta.query_start_R1, meta.context_len_R, meta.block_table_RB, meta.prompt_tokens_R)
            got = module(ids, *places, ours)
            assert torch.equal(got, model(ids, meta.positions_T, theirs, meta))
    for pair, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(pair, other, strict=True))


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.name)
def test_no_graph_break(model: Decoder, bucket: Bucket) -> None:
    module = StepModule(model, SHAPE)
    with torch.no_grad():
        torch._dynamo.reset()
        explained = torch._dynamo.explain(module)(*example_inputs(module, bucket, SHAPE))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons


def test_a_skeleton_has_every_name_and_no_weight(model: Decoder) -> None:
    module = StepModule(model, SHAPE)
    weights = module.constants()
    assert {"cos_0", "sin_0", "model.embed_tokens.data", "model.layers.1.mlp.down.data"} <= weights.keys()
    sent = pickle.dumps(skeleton(module))
    assert len(sent) < sum(tensor.nbytes for tensor in weights.values()) / 2
    bare = pickle.loads(sent)
    assert all(tensor.is_meta for tensor in bare.constants().values())
    shapes = materialize(bare).constants()
    assert {name: (t.shape, t.dtype, t.device.type) for name, t in shapes.items()} == {name: (t.shape, t.dtype, "cpu") for name, t in weights.items()}
    assert not any(tensor.is_meta for tensor in module.constants().values()), "the model itself is untouched"
