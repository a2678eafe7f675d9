#!/usr/bin/env python3
"""Ask a server whatever its OpenAPI document allows and forbids, then send bytes to both of its ports that are no request at all.

    python scripts/fuzz.py --duration 300 --bytes 60
    python scripts/fuzz.py --duration 0 --bytes 20 --seed 7 -- --max-num-seqs 8

starts a server of its own (what stands after `--` goes to `headrace serve`). For --duration seconds schemathesis asks with all of its checks;
for --bytes seconds each, hostile connections come to the HTTP and to the gRPC port. Every connection must be answered or closed within a
bound, no answer may be a 5xx, and in the end the server must be ready, at rest, with every KV block free and nothing in its log that is a
fault. Exit status 1 if not. Needs what the tests need.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from fuzz_bytes import HTTP_ATTACKS, Attack, read_answers
from fuzz_frames import METHODS, FrameAttacks, call_has_ended, message
from own_server import AT_REST, OwnServer, metrics_at_rest, own_server
from plain_http import first_model, get

from headrace.server.open_inference import wire

SERVE = ("--grpc-port", "0", "--max-model-len", "512", "--body-timeout", "5")
HTTP_BOUND = 45.0  # seconds: a head may take 30, a body the 5 above
GRPC_BOUND = 110.0  # a silent client is asked after 60 seconds whether it is there, and has 20 to answer
QUIET = 0.3  # after an answer that is whole
REST_SECONDS = 60.0
FAULT_CODES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)


@dataclass(slots=True)
class Findings:
    sent: Counter[str] = field(default_factory=Counter)  # connections and calls, by kind of attack
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from the last byte sent to the answer or the end of the connection

    def fault(self, text: str) -> None:
        if len(self.faults) < 20:
            print(f"FAULT {text}", flush=True)
        self.faults.append(text)


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=int, default=300, metavar="SECONDS", help="of schemathesis; 0: none")
    parser.add_argument("--bytes", type=float, default=60.0, metavar="SECONDS", help="of hostile connections to each port; 0: none")
    parser.add_argument("--connections", type=int, default=100, help="at the same time")
    parser.add_argument("--seed", type=int, help="default: a fresh one, which is printed")
    ours, serve = list(arguments), []
    if "--" in ours:
        at = ours.index("--")
        ours, serve = ours[:at], ours[at + 1 :]
    return parser.parse_args(ours), serve


def ask_by_document(url: str, seconds: int, seed: int, findings: Findings) -> None:
    """Schemathesis' own report goes to our output."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "all", "--continue-on-failure"]
    command += ["--max-time", str(seconds), "--seed", str(seed), "--request-timeout", "60", "--max-response-time", "60", "--warnings", "off"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "schemathesis.toml").write_text(SETTINGS)
        done = subprocess.run(command, cwd=folder, env={**os.environ, "NO_PROXY": "*", "NO_COLOR": "1"}, timeout=4 * seconds + 300, check=False)
    if done.returncode:
        findings.fault(f"schemathesis ended with {done.returncode}; its report is above")


# The document cannot say all that a body may not hold (two fields that contradict each other, more tokens than the context has): what it
# allows may be answered 400. Everything else is as schemathesis has it.
SETTINGS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "401", "403", "404", "409", "413", "429"]
"""


async def talk(host: str, port: int, attack: Attack, ended: Callable[[bytes], bool], bound: float) -> tuple[bytes, bool, float]:
    """(what came back, whether it was an answer or an end, seconds since the last byte was sent)."""
    reader, writer = await asyncio.open_connection(host, port)
    received, closed = bytearray(), False
    sent_at = time.monotonic()

    async def send() -> None:
        nonlocal sent_at
        with contextlib.suppress(ConnectionError, OSError):  # it hung up while we sent: that is an end, and the reader sees it
            for piece in attack.pieces:
                writer.write(piece)
                await writer.drain()
                sent_at = time.monotonic()
                await asyncio.sleep(attack.pause)
            if attack.half_close:
                writer.write_eof()

    sending = asyncio.create_task(send())
    try:
        while not closed:
            limit = QUIET if sending.done() and ended(bytes(received)) else max(0.01, sent_at + bound - time.monotonic())
            try:
                part = await asyncio.wait_for(reader.read(1 << 16), min(limit, 1.0))
            except TimeoutError:
                if sending.done() and (ended(bytes(received)) or time.monotonic() > sent_at + bound):
                    break
                continue
            received += part
            closed = not part
    except ConnectionError:
        closed = True
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        writer.transport.abort()
    return bytes(received), closed or ended(bytes(received)), time.monotonic() - sent_at


async def attack_port(
    address: str, attacks: Sequence[Callable[[random.Random], Attack]], args: argparse.Namespace, kind: str, findings: Findings
) -> None:
    """Hostile connections until the time is over, and then until each of them has ended."""
    host, _, port = address.rpartition(":")
    is_http = kind == "HTTP"
    deadline = time.monotonic() + args.bytes

    def http_ended(data: bytes) -> bool:
        with contextlib.suppress(ValueError):
            return read_answers(data)[1]
        return True  # no HTTP: told below

    async def client(number: int) -> None:
        chance = random.Random(f"{args.seed}-{kind}-{number}")
        while time.monotonic() < deadline:
            attack = chance.choice(attacks)(chance)
            ended, bound = (http_ended, HTTP_BOUND) if is_http else (call_has_ended, GRPC_BOUND)
            findings.sent[attack.kind] += 1
            try:
                received, done, seconds = await talk(host, int(port), attack, ended, bound)
            except ConnectionRefusedError:
                findings.fault(f"the port takes no connection any more; the last attack was {attack.kind} of client {number}")
                return
            findings.slowest = max(findings.slowest, seconds)
            shown = f"{attack.kind} of client {number}: {b''.join(attack.pieces)[:300]!r} got {received[-300:]!r}"
            if not done:
                findings.fault(f"no answer and no end within {bound:g} s: {shown}")
            if is_http:
                try:
                    statuses, _ = read_answers(received)
                except ValueError as error:
                    findings.fault(f"{error}: {shown}")
                    continue
                findings.statuses.update(map(str, statuses or ["closed"]))
                if any(status >= 500 for status in statuses):
                    findings.fault(f"a 5xx: {shown}")

    await asyncio.gather(*(client(number) for number in range(args.connections)))


async def send_messages(address: str, model: str, args: argparse.Namespace, findings: Findings) -> None:
    """Calls whose frames are right and whose messages are not: none may end as a fault of the server."""
    deadline = time.monotonic() + args.bytes / 4

    async def client(number: int) -> None:
        chance = random.Random(f"{args.seed}-messages-{number}")
        async with grpc.aio.insecure_channel(address) as channel:
            while time.monotonic() < deadline:
                body = bytearray(message(chance, model))
                for _ in range(chance.randint(0, 4)):
                    body[chance.randrange(len(body))] = chance.randrange(256)
                data = bytes(body) if chance.random() < 0.8 else chance.randbytes(chance.randint(0, 60))
                method = chance.choice(METHODS)
                path = f"/{wire.SERVICE}/{method}"
                findings.sent["messages"] += 1
                try:
                    if method == "ModelStreamInfer":
                        async for _ in channel.stream_stream(path)(iter([data]), timeout=60):
                            pass
                    else:
                        await channel.unary_unary(path)(data, timeout=60)
                    code = grpc.StatusCode.OK
                except grpc.aio.AioRpcError as error:
                    code = error.code()
                findings.statuses[code.name] += 1
                if code in FAULT_CODES:
                    findings.fault(f"{method} ended with {code.name}: {data!r}")
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    findings.fault(f"{method} was not answered in 60 s: {data!r}")

    await asyncio.gather(*(client(number) for number in range(8)))


def check_end(server: OwnServer, findings: Findings) -> None:
    if server.process.poll() is not None:
        findings.fault(f"the server has ended with {server.process.returncode}: {server.log_text()[-3000:]}")
        return
    metrics = metrics_at_rest(server.url, REST_SECONDS)
    busy = {name: metrics[name] for name in AT_REST if metrics[name]}
    if busy:
        findings.fault(f"not at rest after {REST_SECONDS:g} s: {busy}")
    for name in ("headrace_engine_restarts_total", "headrace_metrics_faults"):
        if metrics.get(name, 0.0):
            findings.fault(f"{name} is {metrics[name]:g}")
    print(f"at the end /ready answers {get(server.url, '/ready')['status']}")
    if server.stop():
        findings.fault("the server did not end in good order")
    log = server.log_text()
    for word in ("Traceback", "a fault in the server", "CRITICAL"):
        if word in log:
            at = log.index(word)
            findings.fault(f"its log holds {word!r}: {log[max(0, at - 500) : at + 3000]}")


def main(arguments: Sequence[str]) -> int:
    args, serve = parse_arguments(arguments)
    args.seed = random.randrange(2**31) if args.seed is None else args.seed
    findings = Findings()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, own_server([*SERVE, "--batch-dir", folder, *serve]) as server:
        assert server.grpc_address is not None
        model = first_model(server.url)
        if args.duration:
            ask_by_document(server.url, args.duration, args.seed, findings)
        if args.bytes:
            asyncio.run(attack_port(urlsplit(server.url).netloc, HTTP_ATTACKS, args, "HTTP", findings))
            asyncio.run(attack_port(server.grpc_address, FrameAttacks(model).all, args, "gRPC", findings))
            if server.process.poll() is None:
                asyncio.run(send_messages(server.grpc_address, model, args, findings))
            print(f"connections and calls by kind: {dict(sorted(findings.sent.items()))}")
            print(f"answers: {dict(sorted(findings.statuses.items()))}; the slowest answer or end came after {findings.slowest:.1f} s")
        check_end(server, findings)
    print(f"{len(findings.faults)} faults")
    return int(bool(findings.faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
