"""The same-ids law on the real default model: greedy ids in fp32 are those of transformers, whatever the schedule.

An answer is greedy where each of its tokens is the likeliest one after the prompt and the tokens before it; the reference says so of all of
them in one pass. Two implementations may differ where the two likeliest tokens are closer than rounding: another token is accepted only where
the reference's own logits put the two within 1e-4 of each other, and it is printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.llm import RequestOutput
from headrace.models.loader import find_gguf
from headrace.models.store import resolve_model
from headrace.runner.artifact_build import build_artifacts
from headrace.text.tokenizer import Tokenizer
from tests.models.real_reference import transformers_model
from tests.patience import until

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]

NEW_TOKENS = 64
NEAR_TIE = 1e-4
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small harbour town where",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are",
    "A B C D E F G",
    "In 1969, the first people to walk on the Moon",
    "Dear Sir or Madam,\n\nI am writing to",
    "To make a good cup of tea, first",
    "The mitochondria is the",
    "import numpy as np\n\nx = np.",
    "Question: What is the largest planet?\nAnswer:",
    "1, 1, 2, 3, 5, 8, 13,",
    "The train left the station at half past seven, and nobody on the platform noticed that",
    "SELECT name, age FROM people WHERE",
    "La capitale de l'Italie est",
    "The boiling point of a liquid depends on",
    "<html>\n<head>\n<title>",
    "My favourite season is autumn, because",
    "In the beginning",
]
FILLER = "The committee met on a grey morning and went through the list of repairs that the old mill needed before winter. "


@pytest.fixture(scope="module")
def model_path() -> Path:
    return find_gguf(resolve_model(None, progress=False))


class Reference:
    """What transformers says of an answer; each is looked at once, however many schedules give it."""

    def __init__(self, path: Path) -> None:
        self._model = transformers_model(path)
        self._good: set[tuple[int, ...]] = set()

    def check(self, prompt: list[int], answer: list[int]) -> None:
        assert len(answer) == NEW_TOKENS
        whole = (*prompt, *answer)
        if whole in self._good:
            return
        with torch.inference_mode():
            logits = self._model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].double()
        for at, (row, ours) in enumerate(zip(logits, answer, strict=True)):
            right = int(row.argmax())
            gap = float(row[right] - row[ours])
            assert gap < NEAR_TIE, f"token {at}: transformers {right}, ours {ours}, gap {gap}"
            if right != ours:
                print(f"near tie at token {at} of {prompt[:6]}...: transformers {right}, ours {ours}, gap {gap:.2e}")
        self._good.add(whole)


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Reference:
    return Reference(model_path)


@pytest.fixture(scope="module")
def prompts(model_path: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(model_path)
    texts = [FILLER * (i % 4) + prompt for i, prompt in enumerate(PROMPTS)]  # lengths from 5 to about 80
    return [tokenizer.encode(text) for text in texts]


def run(
    model_path: Path, prompts: list[list[int]], *, at_once: int, rounds: int = 1, **config: object
) -> tuple[list[list[int]], list[RequestOutput]]:
    """Ids of the last round, `at_once` requests in flight, from an engine of its own."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    options: dict[str, object] = {"dtype": "float32", "quantization": "none", "max_model_len": 1024, "max_num_seqs": 16, "kv_memory": 256 << 20}
    with LLM(model=str(model_path), **{**options, **config}) as llm:  # type: ignore[arg-type]
        for _ in range(rounds):
            outputs: list[RequestOutput] = []
            for begin in range(0, len(prompts), at_once):
                batch = [{"prompt_token_ids": prompt} for prompt in prompts[begin : begin + at_once]]
                outputs += llm.generate(batch, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], outputs


def check(reference: Reference, prompts: list[list[int]], answers: list[list[int]]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.check(prompt, answer)


def test_the_reference_is_greedy_generation(reference: Reference, prompts: list[list[int]]) -> None:
    """And one other token is found."""
    ids = torch.tensor([prompts[0]])
    with torch.inference_mode():
        out = reference._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    answer = out[0, ids.shape[1] :].tolist()
    reference.check(prompts[0], answer)
    for at in (0, NEW_TOKENS - 1):
        with pytest.raises(AssertionError, match=f"token {at}: transformers {answer[at]}, ours 5,"):
            reference.check(prompts[0], [*answer[:at], 5, *answer[at + 1 :]])


def test_alone(model_path: Path, reference: Reference, prompts: list[list[int]]) -> None:
    got, _ = run(model_path, prompts, at_once=1)
    check(reference, prompts, got)


def test_batch_of_16(model_path: Path, reference: Reference, prompts: list[list[int]]) -> None:
    got, _ = run(model_path, prompts, at_once=16)
    check(reference, prompts, got)


def test_without_planning_ahead(model_path: Path, reference: Reference, prompts: list[list[int]]) -> None:
    got, _ = run(model_path, prompts, at_once=16, async_scheduling=False)
    check(reference, prompts, got)


def test_chunked(model_path: Path, reference: Reference, prompts: list[list[int]]) -> None:
    got, _ = run(model_path, prompts, at_once=16, max_num_batched_tokens=64)
    check(reference, prompts, got)


def test_after_a_prefix_hit(model_path: Path, reference: Reference, prompts: list[list[int]]) -> None:
    got, outputs = run(model_path, prompts, at_once=16, rounds=2)
    assert sum((output.num_cached_tokens or 0) > 0 for output in outputs) == sum(len(prompt) > 16 for prompt in prompts)
    check(reference, prompts, got)


REPEATS = "Repeat this list word by word, again and again: apple, pear, plum, cherry, grape, fig, apple, pear, plum, cherry, grape, fig, apple, pear,"


@pytest.mark.parametrize("at_once", [1, 8])
def test_speculation(model_path: Path, reference: Reference, prompts: list[list[int]], at_once: int) -> None:
    """Guesses are accepted, and the greedy and the drawn ids are those without them."""
    tokenizer = Tokenizer.load(model_path)
    mixed = [tokenizer.encode(REPEATS), tokenizer.encode(FILLER * 3), *prompts[: at_once // 4]]
    options = {"dtype": "float32", "quantization": "none", "max_model_len": 1024, "max_num_seqs": at_once, "kv_memory": 256 << 20}
    params = [SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)] * len(mixed)
    params += [SamplingParams(temperature=0.7, top_p=0.95, seed=i, max_tokens=NEW_TOKENS, ignore_eos=True) for i in range(len(mixed))]
    asked = [{"prompt_token_ids": prompt} for prompt in mixed * 2]
    answers = []
    for speculative_config in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}):
        with LLM(model=str(model_path), speculative_config=speculative_config, **options) as llm:  # type: ignore[arg-type]
            outputs = llm.generate(asked, params, use_tqdm=False)
            stats = llm._engine.client.stats
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert stats is not None
    print(f"guessed {stats.spec_draft_tokens_total}, right {stats.spec_accepted_tokens_total}")
    assert stats.spec_accepted_tokens_total > NEW_TOKENS // 2
    half = len(mixed)
    check(reference, mixed, answers[1][:half])
    different = sum(a != b for a, b in zip(answers[0][half:], answers[1][half:], strict=True))
    assert different <= 1, "drawn ids may differ where two scores are closer than rounding: rarely"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(model_path: Path, reference: Reference, prompts: list[list[int]], mode: str) -> None:
    """A pool of 40 blocks can't hold 16 requests of up to 150 tokens: some must give way and come back."""
    got, outputs = run(
        model_path, prompts, at_once=16, num_gpu_blocks_override=40, max_model_len=512, preemption_mode=mode, swap_space=64 << 20, kv_memory=None
    )
    assert sum(output.outputs[0].num_preemptions for output in outputs) > 0
    check(reference, prompts, got)


def test_compiled(model_path: Path, reference: Reference, prompts: list[list[int]], tmp_path: Path) -> None:
    """Prompts, their chunks and decode steps on compiled paths."""
    options = {"dtype": "float32", "quantization": "none", "max_model_len": 1024, "kv_memory": 256 << 20}
    options |= {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    config = EngineConfig(model=str(model_path), compile="full", compile_cache=str(tmp_path / "cache"), **options)
    build_artifacts(config, tmp_path / "artifacts", lambda name, done, total: None)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(model=str(model_path), artifacts=str(tmp_path / "artifacts"), **options) as llm:
        client = llm._engine.client
        until(lambda: client.compile is not None and {path.state for path in client.compile.paths} == {"compiled"}, 300)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:2]], params, use_tqdm=False)
        status = client.compile
    assert status.compiled_steps_total > NEW_TOKENS
    assert status.recompiles_total == 0
    check(reference, prompts[:2], [list(output.outputs[0].token_ids) for output in outputs])
