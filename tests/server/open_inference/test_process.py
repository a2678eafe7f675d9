"""`--grpc-port` from outside: tritonclient's blocking client, drain, TLS, bytes that are no gRPC, and the real model."""

from __future__ import annotations

import queue
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.models.store import resolve_model
from headrace.server.serve import listen, new_grpc_server
from tests.patience import LIMIT_S, until
from tests.ports import free_port
from tests.server.fakes import World, write_model
from tests.server.open_inference.port import text

ROOT = Path(__file__).parents[3]
SERVE = [sys.executable, "-m", "headrace", "serve"]
FAKE = ["--runner-factory", "tests.server.fakes:make_runner", "--max-num-seqs", "8"]


class Process:
    """`headrace serve` with a gRPC port."""

    def __init__(self, log: Path, model: Path, *flags: str) -> None:
        self.http_port, self.port = free_port(), free_port()
        self.log = log
        self.held = log.with_name("held")
        self.address = f"127.0.0.1:{self.port}"
        ports = ["--port", str(self.http_port), "--grpc-port", str(self.port), "--served-model-name", "small"]
        with log.open("wb") as out:
            self.popen = subprocess.Popen([*SERVE, str(model), *ports, *flags], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def wait_ready(self, channel: grpc.Channel, seconds: float = LIMIT_S) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        deadline = time.monotonic() + seconds
        while True:
            assert self.popen.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            checked = health.Check.future(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
            if checked.code() == grpc.StatusCode.OK and checked.result().status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.05)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """Its steps wait while there is the file `held`."""
    process = Process(tmp_path / "log.txt", write_model(tmp_path / "model", held_by=str(tmp_path / "held")), *FAKE)
    with grpc.insecure_channel(process.address) as channel:
        process.wait_ready(channel)
    yield process
    process.end()


def test_drain_with_http(process: Process):
    """Running requests end, new ones are turned away, an idle stream holds nothing up."""
    with (
        triton.InferenceServerClient(process.address) as client,
        triton.InferenceServerClient(process.address) as idle,
        ThreadPoolExecutor(1) as pool,
    ):
        prompt = [text("text_input", "hello")]
        idle.start_stream(lambda result, error: None)
        results: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer("small", prompt, parameters={"max_tokens": 100, "ignore_eos": True})
        whole = pool.submit(client.infer, "small", prompt, parameters={"max_tokens": 100, "ignore_eos": True})
        results.get(timeout=LIMIT_S)
        process.held.touch()
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: not client.is_server_ready())
        with pytest.raises(triton.InferenceServerException, match="shutting down") as caught:
            client.infer("small", prompt)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        process.held.unlink()
        assert whole.result(LIMIT_S).as_numpy("completion_tokens").tolist() == [100]
        final = False
        while not final:
            result, error = results.get(timeout=LIMIT_S)
            assert error is None
            final = result.get_response().parameters["triton_final_response"].bool_param
        assert result.as_numpy("completion_tokens").tolist() == [100]
        assert process.popen.wait(LIMIT_S) == 0
    log = process.log.read_text()
    assert "Traceback" not in log
    assert f"gRPC     {process.address}" in log


def test_bytes_that_are_no_grpc_do_no_harm(process: Process):
    """Noise, torn HTTP/2 and noise in the place of messages."""
    rng = random.Random(0)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    with grpc.insecure_channel(process.address) as channel, triton.InferenceServerClient(process.address) as client:
        methods = [channel.unary_unary(f"/inference.GRPCInferenceService/{name}") for name in ("ModelInfer", "ModelReady", "ModelMetadata", "Nope")]
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        valid = triton._utils._get_inference_request("small", [text("text_input", "hello")], "", "a", None, 0, False, False, 0, None, {"top_k": 3})
        for _ in range(150):
            noise = rng.randbytes(rng.randrange(200))
            frame = len(noise).to_bytes(3, "big") + bytes((rng.randrange(12), rng.randrange(256))) + rng.randrange(8).to_bytes(4, "big") + noise
            with socket.create_connection(("127.0.0.1", process.port), timeout=LIMIT_S) as peer:
                peer.sendall(rng.choice((noise, preface + noise, preface + frame, preface[: rng.randrange(len(preface))])))
            mutated = bytearray(valid.SerializeToString())
            for _ in range(rng.randrange(1, 6)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            for data in (noise, bytes(mutated)):
                code = rng.choice(methods).future(data, timeout=LIMIT_S).code()
                assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), (code, data)
                for response in stream(iter([data]), timeout=LIMIT_S):
                    assert b"INTERNAL" not in response, (response, data)
        assert client.infer("small", [text("text_input", "hello")], parameters={"max_tokens": 3}).as_numpy("completion_tokens").tolist() == [3]
    assert process.popen.poll() is None
    assert "Traceback" not in process.log.read_text()


def test_tls_with_the_certificate_of_http(tmp_path: Path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
    ]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    process = Process(tmp_path / "log.txt", write_model(tmp_path / "model"), *FAKE, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    try:
        with grpc.secure_channel(f"localhost:{process.port}", grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
            process.wait_ready(channel)
        with triton.InferenceServerClient(f"localhost:{process.port}", ssl=True, root_certificates=str(cert)) as client:
            assert client.infer("small", [text("text_input", "hello")]).as_numpy("finish_reason") is not None
        with grpc.insecure_channel(process.address) as channel, pytest.raises(grpc.RpcError):
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
    finally:
        process.end()


def test_a_port_in_use_ends_the_start(tmp_path: Path):
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        command = [*SERVE, str(write_model(tmp_path / "model")), "--port", "0", "--grpc-port", port, *FAKE]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert "choose another --grpc-port" in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_extra_is_named_where_it_is_missing(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "headrace.server.open_inference.server", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(Exception, match=r"--grpc-port needs .*headrace\[grpc\]"):
        new_grpc_server(world.service)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_model(tmp_path: Path):
    """Whole, streamed and over HTTP are the same answer."""
    process = Process(tmp_path / "log.txt", Path(resolve_model(None)), "--max-model-len", "1024")
    try:
        with grpc.insecure_channel(process.address) as channel:
            process.wait_ready(channel, seconds=200)
        with triton.InferenceServerClient(process.address) as client:
            parameters = {"max_tokens": 12, "temperature": "0"}
            prompt = [text("text_input", "The capital of France is")]
            whole = client.infer("small", prompt, parameters=parameters, compression_algorithm="gzip")
            assert b"Paris" in whole.as_numpy("text_output")[0]
            chat = [text("messages", '[{"role": "user", "content": "What is the capital of France?"}]')]
            assert b"Paris" in client.infer("small", chat, parameters=parameters).as_numpy("text_output")[0]
            results: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: results.put((result, error)))
            client.async_stream_infer("small", prompt, parameters=parameters)
            parts: list[triton.InferResult] = []
            while not parts or not parts[-1].get_response().parameters["triton_final_response"].bool_param:
                result, error = results.get(timeout=LIMIT_S)
                assert error is None
                parts.append(result)
            client.stop_stream()
            assert b"".join(part.as_numpy("text_output")[0] for part in parts) == whole.as_numpy("text_output")[0]
            assert np.concatenate([part.as_numpy("output_ids") for part in parts]).tolist() == whole.as_numpy("output_ids").tolist()
    finally:
        process.end()
