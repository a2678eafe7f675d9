"""The offline interface on the fake runner."""

import asyncio
import gc
import json
import subprocess
import sys
import threading

import psutil
import pytest

import headrace
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.llm import LLM
from headrace.engine.outputs import Logprob
from headrace.errors import ConfigError, ContextLengthExceeded, EngineUnavailable, InvalidRequest, StartError
from headrace.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.patience import LIMIT_S

SCRIPT = {"low": 97, "high": 123, "eos_every": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def options(tokenizer, script=None, **fields):
    return {"model": json.dumps(SCRIPT | (script or {})), "runner_factory": "headrace.runner.fake:make", "tokenizer": tokenizer} | fields


@pytest.fixture(scope="module")
def llm(tokenizer):
    with LLM(**options(tokenizer, max_num_queued_reqs=8, max_num_seqs=4, max_model_len=128)) as llm:
        yield llm


def test_the_package_offers_it():
    assert headrace.LLM is LLM


def test_one_text(llm):
    (output,) = llm.generate("hello", GREEDY)
    assert (output.prompt, output.prompt_token_ids, output.finished, output.num_cached_tokens) == ("hello", list(b"hello"), True, 0)
    (choice,) = output.outputs
    assert choice.text.encode() == bytes(choice.token_ids)
    assert (choice.index, len(choice.token_ids), choice.finish_reason, choice.stop_reason, choice.logprobs) == (0, 6, "length", None, None)
    assert choice.cumulative_logprob is None
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time


def test_every_form_of_prompt(llm):
    forms = ["hello", {"prompt": "hello"}, {"prompt_token_ids": list(b"hello")}, {"prompt_token_ids": tuple(b"hello"), "prompt": "hello"}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["hello", "hello", None, "hello"]
    assert llm.generate(forms[1], GREEDY)[0].outputs[0].text == outputs[0].outputs[0].text
    assert llm.generate([], GREEDY) == []


def test_many_more_prompts_than_the_queue_holds_in_order(llm):
    prompts = [f"prompt number {i}" for i in range(60)]
    params = [SamplingParams(temperature=0, max_tokens=i % 5 + 1, n=i % 3 + 1) for i in range(60)]
    outputs = llm.generate(prompts, params, use_tqdm=False, priority=list(range(60)))
    assert [output.prompt for output in outputs] == prompts
    assert [[len(choice.token_ids) for choice in output.outputs] for output in outputs] == [[i % 5 + 1] * (i % 3 + 1) for i in range(60)]


def test_more_choices_than_the_queue_holds(llm):
    (output,) = llm.generate("x", SamplingParams(n=20, seed=1, max_tokens=2))
    assert [choice.index for choice in output.outputs] == list(range(20))
    assert all(choice.finish_reason == "length" for choice in output.outputs)


def test_logprobs_have_their_usual_form(llm):
    (output,) = llm.generate("ab", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0))
    (choice,) = output.outputs
    assert len(choice.logprobs) == 3
    for token, scores in zip(choice.token_ids, choice.logprobs, strict=True):
        assert isinstance(scores[token], Logprob)
        assert scores[token].decoded_token == chr(token)
        assert 2 <= len(scores) <= 3
    assert choice.cumulative_logprob == sum(scores[token].logprob for token, scores in zip(choice.token_ids, choice.logprobs, strict=True))
    first, second = output.prompt_logprobs
    assert first is None
    assert list(second) == [ord("b")]


def test_default_params_are_those_of_the_class(llm):
    assert len(llm.generate("x")[0].outputs[0].token_ids) == 16


def test_stop_strings(llm):
    whole = llm.generate("x", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    cut = llm.generate("x", SamplingParams(temperature=0, max_tokens=20, stop=whole[4:7]))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[:4], "stop", whole[4:7])


def test_chat(llm):
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == "[user]hi[assistant]"
    assert output.prompt_token_ids == list(b"[user]hi[assistant]")
    two = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "yes"}]], GREEDY, add_generation_prompt=False)
    assert [each.prompt for each in two] == ["[user]hi", "[user]hi[assistant]yes"]
    (own,) = llm.chat(conversation, GREEDY, chat_template="{{ messages[0].content }}{{ mark }}", chat_template_kwargs={"mark": "?"})
    assert own.prompt == "hi?"


def test_embeddings_have_length_one_and_come_in_order(llm):
    prompts = [f"prompt number {i}" for i in range(30)]
    outputs = llm.embed(prompts, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [list(prompt.encode()) for prompt in prompts]
    assert all(output.finished for output in outputs)
    vectors = [output.outputs.embedding for output in outputs]
    assert all(sum(value * value for value in vector) == pytest.approx(1, abs=1e-6) for vector in vectors)
    assert len({tuple(vector) for vector in vectors}) == 30
    (again,) = llm.embed({"prompt_token_ids": list(prompts[7].encode())}, use_tqdm=False)
    assert again.outputs.embedding == vectors[7]


def test_options_of_embeddings(llm):
    (whole,), (mean,) = llm.embed("hello there", use_tqdm=False), llm.embed("hello there", pooling="mean", use_tqdm=False)
    assert whole.outputs.embedding != mean.outputs.embedding
    (short,) = llm.embed("hello there", dimensions=2, use_tqdm=False)
    ratio = whole.outputs.embedding[0] / whole.outputs.embedding[1]
    assert short.outputs.embedding[0] / short.outputs.embedding[1] == pytest.approx(ratio, rel=1e-5)
    (cut,) = llm.embed("hello there", truncate_prompt_tokens=3, use_tqdm=False)
    assert cut.prompt_token_ids == list(b"ere")
    assert len(llm.embed("x" * 128, use_tqdm=False)[0].prompt_token_ids) == 128  # nothing needs room for an answer
    with pytest.raises(ContextLengthExceeded):
        llm.embed("x" * 129, use_tqdm=False)
    for wrong in ({"dimensions": 9}, {"pooling": "cls"}, {"truncate_prompt_tokens": 0}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            llm.embed("x", use_tqdm=False, **wrong)


def test_the_progress_bar(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    bar = capsys.readouterr().err
    assert "Processed prompts: 100%" in bar
    assert "2/2" in bar
    assert "tok/s" in bar
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [5]}, "A prompt must be.*int"),
        ({"prompts": {"text": "x"}}, "A prompt must be"),
        ({"prompts": {"prompt_token_ids": ["a"]}}, "prompt_token_ids"),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, "sampling_params has 1 entries for 2"),
        ({"prompts": ["a"], "sampling_params": ["hot"]}, "sampling_params must hold SamplingParams, not str"),
        ({"prompts": ["a", "b"], "priority": [1, 2, 3]}, "priority has 3"),
        ({"prompts": {"prompt_token_ids": [300]}}, "300"),
        ({"prompts": ""}, "no tokens"),
    ],
)
def test_wrong_arguments_are_named(llm, arguments, message):
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(**{"use_tqdm": False} | arguments)


def test_one_bad_prompt_ends_the_call_and_leaves_nothing_running(llm):
    with pytest.raises(ContextLengthExceeded):
        llm.generate(["fine"] * 10 + ["x" * 500], SamplingParams(max_tokens=100), use_tqdm=False)
    assert len(llm.generate("fine", GREEDY)[0].outputs[0].token_ids) == 6


def test_calls_from_several_threads(llm):
    results: dict[int, list[str]] = {}

    def call(number: int) -> None:
        results[number] = [output.outputs[0].text for output in llm.generate([f"{number} {i}" for i in range(12)], GREEDY, use_tqdm=False)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    alone = {number: [llm.generate(f"{number} {i}", GREEDY, use_tqdm=False)[0].outputs[0].text for i in range(12)] for number in range(4)}
    assert results == alone


def test_without_a_queue_prompts_run_one_after_the_other(tokenizer):
    with LLM(**options(tokenizer, max_num_queued_reqs=0, max_num_seqs=1)) as llm:
        assert [output.finished for output in llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)] == [True] * 3


def test_closing(tokenizer):
    llm = LLM(**options(tokenizer))
    llm.close()
    llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate("x")


def test_start_errors(tokenizer):
    before = threading.active_count()
    with pytest.raises(StartError, match="no such luck"):
        LLM(**options(tokenizer, {"fail_start": "no such luck"}))
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match=r"Unknown option max_sequences.*max_num_seqs"):
        LLM(**options(tokenizer, max_sequences=5))
    with pytest.raises(ConfigError, match="max-num-seqs"):
        LLM(**options(tokenizer, max_num_seqs=0))


FORGETFUL = """
import sys
from pathlib import Path
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1], tokenizer=Path(sys.argv[2]), runner_factory="headrace.runner.fake:make")
print(llm._engine.client.pid, llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)[0].finished)
"""


def test_a_program_that_never_closes_ends_cleanly(tmp_path):
    command = [sys.executable, "-c", FORGETFUL, json.dumps(SCRIPT), str(write_byte_tokenizer(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pid, finished = done.stdout.split()
    assert finished == "True"
    assert not psutil.pid_exists(int(pid))


def test_an_llm_that_nobody_holds_ends_its_engine(tokenizer):
    llm = LLM(**options(tokenizer))
    pid = llm._engine.client.pid
    del llm
    gc.collect()
    assert not psutil.pid_exists(pid)


async def test_async_outputs_grow(tokenizer):
    async with AsyncLLM(**options(tokenizer, {"step_seconds": 0.02})) as llm:
        lengths = [len(output.outputs[0].token_ids) async for output in llm.generate("x", SamplingParams(temperature=0, max_tokens=40))]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 40
        assert len(lengths) > 1
        answers = await asyncio.gather(*(last(llm, f"prompt {i}") for i in range(5)))
        assert all(answer.finished for answer in answers)


async def last(llm: AsyncLLM, prompt: str):
    *_, output = [output async for output in llm.generate(prompt, GREEDY)]
    return output
