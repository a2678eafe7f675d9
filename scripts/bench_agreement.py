#!/usr/bin/env python3
"""Whether `headrace bench serve` measures what there is: against a server whose delays are known, and against another load generator.

    python scripts/bench_agreement.py
    python scripts/bench_agreement.py --guidellm ENVIRONMENT/bin/guidellm --step-ms 20
    python scripts/bench_agreement.py --guidellm ENVIRONMENT/bin/guidellm -- MODEL --threads 4

The first reads streams of a server that notes when it wrote each token, and prints how much later a token was seen. With `--guidellm`, the
program of that name in an environment of its own puts the same requests, as many at a time, on the same server, in turn with ours: throughput,
time to first token and inter-token latency, the median over the rounds of each round's median, and how far rounds of one generator differ. What
stands after `--` are a model and flags of `headrace serve`.

Client and server run on CPUs of their own, where there are two, and what the clients leave of theirs is filled by a process of the lowest
priority: so the server computes beside a busy neighbour whoever measures it, and the generator that works more does not find a slower server. With
`--step-ms` the server computes nothing: each of its steps sleeps so long, whatever else the machine does. The exit status is 1 where a delay is off
by more than 2 ms (of 99 in 100 tokens), or a figure by more than 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from own_server import own_server

from headrace.bench.load import run_load
from headrace.bench.sse_client import Target
from headrace.bench.workload import BenchRequest

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROOT = Path(__file__).resolve().parent.parent
MAX_DELAY_MS, MAX_DIFFERENCE = 2.0, 0.05
FIGURES = ("output tokens/s", "TTFT ms", "ITL ms")
# what guidellm's requests say: nothing of a temperature, and usage with every piece, which the server has to write
AS_THEY_ASK = ("--temperature", "1", "--extra-body", '{"stream_options": {"include_usage": true, "continuous_usage_stats": true}}')
Round = tuple[float, float, float]


def delays_seen(num_requests: int, num_tokens: int) -> list[float]:
    """Milliseconds from writing to seeing, of every token. The server is a process of its own: threads of one would wait for each other's turns."""
    ours_end, their_end = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_scripted, args=(their_end,))
    process.start()
    requests = [BenchRequest(prompt="p", max_tokens=num_tokens)] * num_requests
    run = asyncio.run(run_load(Target(ours_end.recv()), requests, [0.0] * num_requests, model="scripted", max_concurrency=1))
    ours_end.send(None)
    all_written = ours_end.recv()
    process.join()
    delays = []
    for record, written in zip(run.records, all_written, strict=True):
        assert record.first is not None, record.error
        read = accumulate(record.gaps, initial=record.first)
        delays += [1e3 * (seen - wrote) for seen, wrote in zip(read, written, strict=True)]
    return delays


def _serve_scripted(pipe: Connection) -> None:
    """Says where it listens, waits for the end, and tells when it wrote each token."""
    from tests.bench.scripted_server import scripted_server

    with scripted_server(first_s=0.05, gap_s=0.01) as server:
        pipe.send(server.url)
        pipe.recv()
        pipe.send(server.written)


def write_work(path: Path, count: int, output_tokens: int) -> None:
    """Requests that both programs read, each by its own names."""
    rng = random.Random(0)
    words = ["the", "river", "wheel", "water", "mill", "stone", "grain", "road", "town", "light", "field", "winter"]
    with path.open("w") as file:
        for number in range(count):
            prompt = f"{number}: " + " ".join(rng.choice(words) for _ in range(100))
            file.write(json.dumps({"prompt": prompt, "output_tokens": output_tokens, "output_tokens_count": output_tokens}) + "\n")


def ours(url: str, work: Path, folder: Path, count: int, clients: int) -> Round:
    command = [sys.executable, "-m", "headrace", "bench", "serve", "--base-url", url, "--dataset-path", str(work), "--num-prompts", str(count)]
    command += ["--max-concurrency", str(clients), "--num-warmups", "0", *AS_THEY_ASK]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "ours.json"]
    subprocess.run(command, check=True, capture_output=True)
    result = json.loads((folder / "ours.json").read_text())
    return result["output_throughput"], result["median_ttft_ms"], result["median_itl_ms"]


def theirs(program: str, url: str, work: Path, folder: Path, count: int, clients: int) -> Round:
    report = folder / "theirs.json"
    command = [program, "run", "--backend", f"kind=openai_http,target={url},request_format=/v1/completions"]
    command += ["--profile", f"kind=concurrent,streams={clients}", "--constraint", f"kind=max_requests,count={count}"]
    command += ["--data", f"kind=json_file,path={work}", "--output", f"kind=json,path={report}", "--disable-console"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return round_of(benchmark["metrics"], benchmark["requests"]["successful"])


def round_of(metrics: dict[str, Any], requests: Sequence[dict[str, Any]]) -> Round:
    """Their figures; the throughput is that of their requests as we define it: all tokens over the time from the first request to the last token."""
    seconds = max(each["request_end_time"] for each in requests) - min(each["request_start_time"] for each in requests)
    tokens = sum(each["output_tokens"] for each in requests)
    ttft, itl = (metrics[name]["successful"]["median"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return tokens / seconds, ttft, itl


def compared(our: Sequence[Round], their: Sequence[Round]) -> tuple[str, bool]:
    """The table, and whether all figures agree."""
    lines, agree = ["| figure | headrace bench serve | guidellm | difference |", "|---|---|---|---|"], True
    for name, mine, others in zip(FIGURES, zip(*our, strict=True), zip(*their, strict=True), strict=True):
        one, other = statistics.median(mine), statistics.median(others)
        cells = (f"{middle:.2f} ({min(values):.2f} to {max(values):.2f})" for middle, values in ((one, mine), (other, others)))
        lines.append(f"| {name} | {' | '.join(cells)} | {one / other - 1:+.1%} |")
        agree &= abs(one / other - 1) <= MAX_DIFFERENCE
    return "\n".join(lines), agree


def served(folder: Path, options: argparse.Namespace) -> list[str]:
    """What the server is started with."""
    if options.step_ms is None:
        return [*options.flags, "--threads", str(len(divide_cpus()[0]))] if "--threads" not in options.flags else list(options.flags)
    from tests.server.fakes import write_model

    model = folder / "model"
    model.mkdir()
    write_model(model, step_seconds=options.step_ms / 1e3, eos_every=0, max_model_len=4096, num_blocks=4096)
    return [str(model), "--runner-factory", "tests.server.fakes:make_runner", *options.flags]


def divide_cpus() -> tuple[set[int], set[int]]:
    """For the server and for clients."""
    cpus = sorted(os.sched_getaffinity(0))
    return (set(cpus[:-1]), set(cpus[-1:])) if len(cpus) > 1 else (set(cpus), set(cpus))


@contextlib.contextmanager
def filled(cpus: set[int]) -> Iterator[None]:
    """What others leave of these CPUs is used up by processes that give way to anybody."""
    program = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program], preexec_fn=lambda cpu=cpu: os.sched_setaffinity(0, {cpu})) for cpu in cpus]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--step-ms", type=float, help="no model: steps that take so long")
    parser.add_argument("flags", nargs="*", help="after --: a model and flags of headrace serve")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # for what the tests have of servers
    delays = sorted(delays_seen(8, 60))
    late = delays[int(0.99 * len(delays))]
    good = late <= MAX_DELAY_MS
    print(
        f"{len(delays)} tokens seen after they were written: median {statistics.median(delays):.3f} ms, 99 % within {late:.3f} ms, "
        f"longest {delays[-1]:.3f} ms",
        flush=True,
    )
    if options.guidellm is None:
        return int(not good)
    os.chdir(ROOT)
    server_cpus, client_cpus = divide_cpus()
    os.sched_setaffinity(0, server_cpus)  # what is started inherits it
    with tempfile.TemporaryDirectory() as name, own_server([*served(Path(name), options), "--no-enable-prefix-caching"]) as server:
        os.sched_setaffinity(0, client_cpus)
        folder, work = Path(name), Path(name) / "work.jsonl"
        write_work(work, options.requests, options.output_tokens)
        load = (work, folder, options.requests, options.clients)
        rounds: tuple[list[Round], list[Round]] = [], []
        with filled(client_cpus - server_cpus):
            ours(server.url, *load)  # warms up
            for number in range(options.rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    rounds[which].append(theirs(options.guidellm, server.url, *load) if which else ours(server.url, *load))
        table, agree = compared(*rounds)
        print(table)
        return int(not (good and agree))


if __name__ == "__main__":
    sys.exit(main())
