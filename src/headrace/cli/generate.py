"""`headrace generate`: prompts from files in, one JSON object a line out, many at a time on an engine of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from headrace.cli import values
from headrace.cli.chat import add_sampling
from headrace.cli.options import ENGINE_GROUPS, add_options, reader
from headrace.cli.prompt_files import Line, LineRequest, line_id, parse_line, read_lines
from headrace.cli.settings import engine_options, merge
from headrace.errors import ConfigError, QueueFull, RequestError

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.outputs import RequestOutput

EPILOG = """\
examples:
  headrace generate prompts.txt --output answers.jsonl --chat
  headrace generate requests.jsonl --output answers.jsonl --temperature 0 --max-tokens 200
  echo 'The capital of France is' | headrace generate --max-tokens 8

input:   a text file holds one prompt a line; a .jsonl file one object a line:
         {"prompt": "..."} or {"messages": [...]}, with "params": {"temperature": 0, ...} and "id" where wanted
output:  {"index": 0, "choices": [{"text": "...", "finish_reason": "stop"}], "usage": {...}}, in the order of the input;
         a line that fails gets {"index": 3, "error": {...}}, and the others go on. Exit status 1: some line failed.
"""

RETRY_SECONDS = 0.2  # before a request that found the queue full is sent again


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "generate",
        usage="headrace generate [FILE ...] [FLAGS]",
        help="answer the prompts in files, as JSONL",
        description="Answer the prompts in files, as JSONL.",
        epilog=EPILOG,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", default=["-"], help="inputs (default: - for stdin)")
    parser.add_argument("--model", metavar="MODEL", help="GGUF file, Hugging Face directory or hub name; default: SmolLM2-135M-Instruct")
    parser.add_argument("--output", "-o", metavar="FILE", help="where the answers go (default: stdout)")
    parser.add_argument("--resume", action="store_true", help="keep the lines that --output has already, and go on after them")
    parser.add_argument("--format", choices=("auto", "text", "jsonl"), default="auto", help="of the input; auto: by the file's name (default: auto)")
    parser.add_argument("--chat", action="store_true", help="make each prompt a user message of a chat")
    add_sampling(parser, max_tokens=256)
    parser.add_argument("-n", type=reader(values.positive_integer), metavar="N", help="answers for each prompt (default: 1)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="ends an answer; may be given again")
    add_options(parser, ENGINE_GROUPS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.resume and not args.output:
        raise ConfigError("--resume needs --output: it goes on after the lines in that file.")
    defaults = {name: value for name in ("max_tokens", "temperature", "top_p", "n", "stop") if (value := getattr(args, name)) is not None}
    options = engine_options(merge(args, {}))  # --seed is the engine's: it seeds each request that brings none
    lines = read_lines(args.files, args.format)
    with _output(args.output, resume=args.resume) as (out, done):
        failed = asyncio.run(_answer_all(args, options, lines[done:], done, defaults, out))
    print(f"{len(lines) - done} lines answered, {failed} of them with an error.", file=sys.stderr)
    return int(failed > 0)


@contextlib.contextmanager
def _output(path: str | None, *, resume: bool) -> Iterator[tuple[TextIO, int]]:
    """The stream to write to, and how many lines of it are there already."""
    if path is None:
        yield sys.stdout, 0
        return
    file = Path(path)
    done = 0
    if resume and file.exists():
        whole = file.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]  # a line that was cut off is written again
        file.write_bytes(whole)
        done = whole.count(b"\n")
    try:
        stream = file.open("a" if resume else "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error}") from error
    with stream:
        yield stream, done


async def _answer_all(args: argparse.Namespace, options: dict[str, Any], lines: list[Line], first: int, defaults: dict[str, Any], out: TextIO) -> int:
    """Writes one line for each line, in order; how many failed."""
    if not lines:
        return 0
    from tqdm import tqdm

    from headrace.engine.async_llm import AsyncLLM

    failed = 0
    async with AsyncLLM(args.model, **options) as llm:
        window = 2 * llm.config.max_num_seqs  # enough that none of the engine's rows stays empty while one line waits for its turn
        with tqdm(total=len(lines), desc="Lines", unit="line", dynamic_ncols=True, file=sys.stderr) as progress:
            running: deque[asyncio.Task[dict[str, Any]]] = deque()
            try:
                for index, line in enumerate(lines, start=first):
                    running.append(asyncio.create_task(_answer(llm, index, line, defaults, chat=args.chat)))
                    if len(running) >= window:
                        failed += _write(out, await running.popleft())
                        progress.update()
                while running:
                    failed += _write(out, await running.popleft())
                    progress.update()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
    return failed


def _write(out: TextIO, answer: dict[str, Any]) -> bool:
    out.write(json.dumps(answer, ensure_ascii=False) + "\n")
    out.flush()
    return "error" in answer


async def _answer(llm: AsyncLLM, index: int, line: Line, defaults: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """The line of output for one line of input."""
    head: dict[str, Any] = {"index": index}
    if (name := line_id(line)) is not None:
        head["id"] = name
    try:
        request = parse_line(line, defaults, chat=chat)
        while True:
            try:
                output = await _generate(llm, request)
                break
            except QueueFull:
                await asyncio.sleep(RETRY_SECONDS)
    except RequestError as error:
        return head | error.body()
    choices = [{"text": choice.text, "finish_reason": choice.finish_reason} for choice in output.outputs]
    usage = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": sum(len(choice.token_ids) for choice in output.outputs)}
    return head | {"choices": choices, "usage": usage}


async def _generate(llm: AsyncLLM, request: LineRequest) -> RequestOutput:
    if request.messages is None:
        outputs = llm.generate(request.prompt or "", request.params)
    else:
        outputs = llm.generate_parsed(llm.render_chat(request.messages), request.params)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            last = output
    return last
