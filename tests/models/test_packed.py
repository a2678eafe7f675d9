"""GGUF models whose matrices stay in their blocks, against the same files dequantised, and against themselves in other batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.errors import ModelLoadError
from headrace.kernels import cpu
from headrace.models.decoder import Decoder
from headrace.models.gguf import GGUFFile
from headrace.models.loader import find_gguf, load_model, weight_bytes
from headrace.models.packed import PackedDecoder, PackedStack
from headrace.models.store import resolve_model
from headrace.text.tokenizer import Tokenizer
from tests.kernels.cpu.test_linear import rounded
from tests.models.gguf_writer import write_gguf
from tests.models.paged_driver import PagedDriver
from tests.models.test_gguf_blocks import random_blocks
from tests.models.test_gguf_models import CASES, tame
from tests.models.tiny_models import TINY, make, prompt

FORMATS = ("F32", "F16", "Q4_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q6_K")
# Activations are rounded before each product with a quantised matrix; all else is float32 and the weights are those of the file.
NEAR = 3e-2  # to the dequantised model: of the logits' norm
ROUNDED = 1e-2  # to the dequantised model with activations rounded in the same way: a last bit may round one to its neighbour
EXACT = 1e-5  # where the weights are floats
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.06,
}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(autouse=True)
def kernels() -> cpu.CpuKernels:
    loaded = cpu.load()
    if loaded is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    return loaded


def load(path, *, packed: bool) -> Decoder:
    return load_model(str(path), dtype=torch.float32, device=torch.device("cpu"), packed=packed)


def blocks_of(name: str, matrices=MATRICES) -> dict[str, np.ndarray]:
    """Random blocks for matrices of `SIZES`: the `gguf` package can read K formats but not make them."""
    row_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    rows = {"attn_k": 64, "attn_v": 64}
    return {
        f"blk.{layer}.{matrix}.weight": tame(name, random_blocks(name, rows.get(matrix, 256), seed=layer).reshape(-1, row_bytes))
        for layer in range(2)
        for matrix in matrices
    }


def write(path, name: str):
    """A tiny llama with all its matrices (of the K formats: all of its layers) in one format."""
    theirs = make("LlamaConfig", SIZES)
    write_gguf(theirs, path, "llama", quantization=name, blocks=blocks_of(name) if name.endswith("_K") else None)
    return path


def test_a_start_loads_no_compiler(tmp_path):
    """Neither loading nor a step imports what torch computes with on the meta device: sympy and its compiler take 70 MiB and a second or two."""
    path = write(tmp_path / "model.gguf", "Q4_0")
    code = (
        "import sys; from headrace.config import EngineConfig; from headrace.runner.model_runner import ModelRunner\n"
        f"runner = ModelRunner(EngineConfig(model={str(path)!r}, threads=1, kv_memory=2**22, max_model_len=64))\n"
        "sys.exit(str({'sympy', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)) if 'packed' in runner.info(0.0).path else 'not packed')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "set()"


def difference(ours: torch.Tensor, want: torch.Tensor) -> float:
    return float((ours - want).norm() / want.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_near_the_dequantised_ones(name, kernels, tmp_path):
    path, tokens = write(tmp_path / "model.gguf", name), prompt(40)
    packed, plain = load(path, packed=True), load(path, packed=False)
    assert not list(packed.parameters()), "no weight is left in floating point"
    tiles = kernels.isa == "amx"  # which multiply the tokens of prompts in bfloat16
    logits, floats = PagedDriver(packed).prefill(tokens), name in (("F32",) if tiles else ("F32", "F16"))
    assert difference(logits, PagedDriver(plain).prefill(tokens)) < (EXACT if floats else NEAR)
    for path, twin in packed.named_modules():
        if isinstance(twin, cpu.PackedLinear) and twin.type_number != 0:
            module = plain.get_submodule(path)
            if tiles and path != "lm_head":
                module.weight.copy_(module.weight.bfloat16())
                module.register_forward_pre_hook(lambda _, args: (args[0].bfloat16().float(),))
            elif cpu.FORMATS[twin.type_number].startswith("Q"):
                module.register_forward_pre_hook(lambda _, args: (rounded(args[0]).float(),))
    assert difference(logits, PagedDriver(plain).prefill(tokens)) < (EXACT if floats else ROUNDED)


@pytest.mark.parametrize("name", CASES)
def test_every_architecture(name, tmp_path):
    """In float32, where nothing is rounded: biases, norms in other places, windows, caps, layers without rotation, other activations."""
    class_name, changes, metadata = CASES[name]
    path, tokens = tmp_path / "model.gguf", prompt(25)
    write_gguf(make(class_name, changes), path, name.split("-")[0], metadata=metadata)
    got, want = (PagedDriver(load(path, packed=packed)).prefill(tokens, chunks=[20, 1, 4]) for packed in (True, False))
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K"])
def test_the_same_bits_whatever_the_batch_and_the_chunks(name, tmp_path):
    model = load(write(tmp_path / "model.gguf", name), packed=True)
    prompts = [prompt(length, seed=length) for length in range(1, 33, 2)]
    alone = [answer(model, [tokens], 6)[0] for tokens in prompts]
    assert answer(model, prompts, 6) == alone
    tokens = prompt(60)
    whole = PagedDriver(model).prefill(tokens)
    assert torch.equal(PagedDriver(model).prefill(tokens, chunks=[17, 1, 30, 12]), whole)
    assert torch.equal(PagedDriver(model).prefill(tokens, chunks=[1] * 60), whole)


def answer(model: Decoder, prompts: list[list[int]], count: int) -> list[list[tuple[int, bytes]]]:
    """`count` greedy tokens of each prompt, computed together, with the bits of their logits."""
    driver = PagedDriver(model, num_blocks=512, block_size=4)
    answers: list[list[tuple[int, bytes]]] = [[] for _ in prompts]
    work = dict(enumerate(prompts))
    for _ in range(count):
        logits = driver.step(work)
        for row, answered in enumerate(answers):
            answered.append((int(logits[row][-1].argmax()), logits[row][-1].numpy().tobytes()))
        work = {row: [answered[-1][0]] for row, answered in enumerate(answers)}
    return answers


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama", [(0, 4)]),
        ("mistral-window", [(0, 4)]),
        ("smollm3", [(0, 3), (3, 4)]),  # its fourth layer turns nothing
        ("smollm3-window", [(0, 3), (3, 4)]),
        ("llama-gelu", [0, 1, 2, 3]),
    ],
)
def test_neighbouring_layers_are_one_call_with_the_same_bits(name, parts, tmp_path):
    class_name, changes = TINY[name]
    make(class_name, changes | {"head_dim": 16}).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"), kernels=True)
    assert [part if isinstance(part, int) else (part.first, part.last) for part in model._parts] == parts
    tokens = prompt(30)
    got = PagedDriver(model).prefill(tokens, chunks=[20, 1, 9])
    model._parts = [0, 1, 2, 3]
    assert torch.equal(PagedDriver(model).prefill(tokens, chunks=[20, 1, 9]), got)


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K"])
def test_parts_in_different_formats(name, tmp_path, caplog):
    """v in another format than q and k, with biases, as files of mixed formats have it; Q2_K has no kernel and goes over float16."""
    path, tokens = tmp_path / "model.gguf", prompt(20)
    write_gguf(make("Qwen2Config", SIZES), path, "qwen2", quantization=name, blocks=blocks_of(name, ("attn_v", "ffn_down")))
    packed = load(path, packed=True)
    assert isinstance(packed.layers[0].attention.qkv, PackedStack)
    assert difference(PagedDriver(packed).prefill(tokens), PagedDriver(load(path, packed=False)).prefill(tokens)) < NEAR
    assert [record.getMessage() for record in caplog.records if "Q2_K" in record.getMessage()] == (
        [f"there is no kernel for Q2_K: these weights of {path} are kept as float16"] if name == "Q2_K" else []
    )


def test_the_weights_take_what_they_take_in_the_file(tmp_path):
    path = write(tmp_path / "model.gguf", "Q4_0")
    packed = load(path, packed=True)
    assert weight_bytes(packed) == sum(tensor.num_bytes for tensor in GGUFFile(path).tensors.values())
    assert weight_bytes(packed) < weight_bytes(load(path, packed=False)) / 6


def test_what_does_not_fit_is_named(tmp_path):
    path, zeros = tmp_path / "model.gguf", np.zeros((5, 48), np.float32)
    for extra, named in (
        ({"blk.0.surprise.weight": zeros}, r"not part of this architecture: blk\.0\.surprise\.weight"),
        ({"output.weight": zeros}, r"'output\.weight' has the shape \[5, 48\].* \[96, 48\]"),
    ):
        write_gguf(make("LlamaConfig", {"tie_word_embeddings": True}), path, "llama", extra=extra)
        with pytest.raises(ModelLoadError, match=named):
            load(path, packed=True)
    make(*TINY["llama"]).save_pretrained(tmp_path / "directory")
    with pytest.raises(ModelLoadError, match="Hugging Face directory"):
        load(tmp_path / "directory", packed=True)


TEXT = Path(__file__).with_name("harbour.txt").read_text(encoding="utf-8").rstrip()
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = ["What is the capital of France?", "Name three colours.", "How many days has a week?", "Write a line about the sea."]


@pytest.mark.real_model
def test_the_default_model():
    path = find_gguf(resolve_model(None, progress=False))
    packed, plain, tokenizer = load(path, packed=True), load(path, packed=False), Tokenizer.load(path)

    ids = tokenizer.encode(TEXT)
    got, want = (PagedDriver(model, block_size=16).prefill(ids) for model in (packed, plain))
    perplexity = [float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp()) for logits in (got, want)]
    assert perplexity[0] == pytest.approx(perplexity[1], rel=0.01)
    assert difference(got, want) < 0.02
    assert float((got.argmax(-1) == want.argmax(-1)).float().mean()) > 0.97
    ours, theirs = got.log_softmax(-1), want.log_softmax(-1)
    assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 0.001, "nats a token"
    wide = load(path, packed=True)
    assert isinstance(wide, PackedDecoder)
    wide.use_16_bit_activations()
    assert difference(PagedDriver(wide, block_size=16).prefill(ids), want) < 5e-4
    # the template's own system text, after which Paris and another answer are nearly tied
    nearly_tied = [tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\n")]
    assert "Paris" in tokenizer.decode([token for token, _ in answer(packed, nearly_tied, 8)[0]])
    prompts = [tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n") for question in (*QUESTIONS, *QUESTIONS[:2]) * 3][
        :16
    ]
    alone = [answer(packed, [tokens], 12)[0] for tokens in prompts[:4]]
    together = answer(packed, prompts, 12)
    assert together[:4] == alone
    assert "Paris" in tokenizer.decode([token for token, _ in together[0]])
