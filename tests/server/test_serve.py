"""The serving process from outside, with a real engine process around the fake runner."""

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from headrace.config import EngineConfig, ServerConfig
from headrace.core.messages import AddRequest
from headrace.errors import ConfigError, StartError
from headrace.server.ready_message import ready_message
from headrace.server.serve import Signals, end_of_service, listen, read_template, run, self_test
from headrace.server.service import Service
from tests.core.block_world import Engine, config
from tests.core.block_world import request as core_request
from tests.patience import LIMIT_S
from tests.ports import free_port
from tests.server.fakes import FakeEngine, World, refused, write_model

ROOT = Path(__file__).parents[2]


class Process:
    """`headrace serve` on a model of the fake runner."""

    def __init__(self, model: Path, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = model / "log.txt"
        self.held = model / "held"
        command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", str(self.port)]
        command += ["--runner-factory", "tests.server.fakes:make_runner", "--max-num-seqs", "8", *flags]
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def output(self) -> str:
        return self.log.read_text()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LIMIT_S, trust_env=False)

    def status(self, path: str) -> int | None:
        try:
            return self.get(path).status_code
        except httpx.HTTPError:
            return None

    def until(self, condition: Callable[[], bool], seconds: float = LIMIT_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"still not so\n{self.output()}"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.popen.poll() is None, self.output()
            return self.status("/ready") == 200

        self.until(ready)

    def complete(self, **body: object) -> httpx.Response:
        fields = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, **body}
        return httpx.post(f"{self.url}/v1/completions", json=fields, timeout=LIMIT_S, trust_env=False)

    def stream(self, pool: ThreadPoolExecutor, **body: object) -> Future[str]:
        """The whole text of a stream; returns when it has begun."""
        begun = threading.Event()
        fields = {"prompt": "hello", "ignore_eos": True, "stream": True, **body}

        def read() -> str:
            try:
                with httpx.stream("POST", f"{self.url}/v1/completions", json=fields, timeout=LIMIT_S, trust_env=False) as response:
                    pieces = []
                    for piece in response.iter_text():
                        pieces.append(piece)
                        begun.set()
                    return "".join(pieces)
            finally:
                begun.set()

        text = pool.submit(read)
        assert begun.wait(LIMIT_S)
        return text

    def wait_running(self, count: int) -> None:
        """Until the engine computes so many requests."""
        line = re.compile(rf"^headrace_num_requests_running{{.*}} {count}\.0$", re.MULTILINE)
        self.until(lambda: line.search(self.get("/metrics").text) is not None)

    def ended(self) -> int:
        return self.popen.wait(LIMIT_S)

    def hold(self) -> None:
        """No start and no step ends from now on, but for one that is just ending."""
        self.held.touch()

    def let_go(self) -> None:
        self.held.unlink()

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        (pid,) = (int(child) for child in children if b"engine_host" in Path(f"/proc/{child}/cmdline").read_bytes())
        return pid

    def kill(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*flags, port=..., held=..., **script)` starts a server whose fake runner follows the script, and is held by `Process.held`."""
    started: list[Process] = []

    def start(*flags: str, port: int | None = None, held: bool = False, **script: object) -> Process:
        folder = tmp_path / f"model-{len(started)}"
        model = write_model(folder, held_by=str(folder / "held"), **script)
        if held:
            (folder / "held").touch()
        started.append(Process(model, *flags, port=port))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_from_start_to_an_idle_end(start: Start):
    process = start(held=True)
    process.until(lambda: process.status("/health") == 200)
    assert process.status("/ready") == 503
    refused(process.complete(), 503, code="engine_unavailable")
    process.let_go()
    process.wait_ready()
    first, again = process.complete(seed=1, temperature=0), process.complete(seed=2, temperature=0)
    assert first.json()["choices"] == again.json()["choices"]
    assert first.json()["usage"]["completion_tokens"] == 5
    assert f"is ready at {process.url}" in process.output()
    process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == 0
    assert process.status("/health") is None
    assert "Traceback" not in process.output()


def test_the_printed_request_works(start: Start):
    process = start("--api-key", "sk-1", eos_every=0, low=97, high=123)
    process.until(lambda: "curl" in process.output())
    command = process.output()[process.output().index("curl") :].replace("YOUR_API_KEY", "sk-1")
    assert "sk-1" not in process.output()
    done = subprocess.run(["bash", "-c", command.replace("curl", "curl -s --noproxy '*'")], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_https_with_a_certificate_of_ones_own(start: Start, tmp_path: Path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], check=True, capture_output=True)
    process = start("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), eos_every=0)
    url = f"https://127.0.0.1:{process.port}"
    with httpx.Client(verify=ssl.create_default_context(cafile=str(cert)), trust_env=False, timeout=LIMIT_S) as client:

        def ready() -> bool:
            try:
                return client.get(f"{url}/ready").status_code == 200
            except httpx.ConnectError:
                return False

        process.until(ready)
        body = {"prompt": "hello", "max_tokens": 5, "stream": True}
        assert client.post(f"{url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    assert process.status("/health") is None  # nothing is said without encryption
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/health", timeout=LIMIT_S, trust_env=False)
    process.popen.terminate()
    assert process.ended() == 0


def test_running_requests_may_end(start: Start, pool: ThreadPoolExecutor):
    process = start(step_seconds=0.02)
    process.wait_ready()
    plain = pool.submit(process.complete, max_tokens=150)
    stream = pool.submit(process.complete, max_tokens=150, stream=True)
    process.wait_running(2)
    process.hold()
    process.popen.send_signal(signal.SIGINT)
    process.until(lambda: process.status("/ready") == 503)
    refused(process.complete(), 503, code="engine_unavailable")
    process.let_go()
    assert plain.result().json()["usage"]["completion_tokens"] == 150
    assert stream.result().text.endswith("data: [DONE]\n\n")
    assert process.ended() == 0


@pytest.mark.parametrize("force", [False, True])
def test_those_that_take_too_long_end_with_an_error(start: Start, pool: ThreadPoolExecutor, force: bool):
    process = start("--shutdown-timeout", "200" if force else "0.5", step_seconds=0.05)
    process.wait_ready()
    stream = process.stream(pool, max_tokens=400)
    plain = pool.submit(process.complete, max_tokens=400)
    process.wait_running(2)
    process.hold()
    process.popen.send_signal(signal.SIGTERM)
    if force:
        process.until(lambda: process.status("/ready") == 503)
        process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == (128 + signal.SIGTERM if force else 0)
    *_, last = stream.result().split("\n\n")[:-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    refused(plain.result(), 503)


def test_a_stream_that_has_not_begun_is_refused_when_time_is_up(start: Start, pool: ThreadPoolExecutor):
    process = start("--shutdown-timeout", "0.1")
    process.wait_ready()
    process.hold()
    stream = pool.submit(process.complete, max_tokens=400, stream=True)
    process.wait_running(1)
    process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == 0
    refused(stream.result(), 503)


async def test_an_end_by_force_comes_after_the_last_events():
    """uvicorn then waits for nobody, and an engine that is dead already ends at once."""
    order: list[str] = []
    signals, service = Signals(), Service(config=ServerConfig(), engine=FakeEngine(), model_names=("m",), max_requests=1)
    signals.force.set()

    async def stream() -> None:
        with service.admission.permit():
            await ended.wait()
            for _ in range(5):
                await asyncio.sleep(0)  # through the layers
            order.append("last event")

    class Ends:
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            order.append(self.name)
            ended.set()

    class Http:
        force_exit = should_exit = False

        async def serve(self) -> None:
            while not self.should_exit:  # noqa: ASYNC110 - as uvicorn does
                await asyncio.sleep(0)
            order.append(f"port, by force: {self.force_exit}")

    ended, http = asyncio.Event(), Http()
    running, serving = asyncio.create_task(stream()), asyncio.create_task(http.serve())
    await asyncio.sleep(0)
    await end_of_service(http, serving, service, signals, (Ends("batches"), Ends("engine")))  # type: ignore[arg-type]
    assert order == ["batches", "engine", "last event", "port, by force: True"]
    await running
    service.close()


def test_a_dead_engine_ends_streams_with_an_error_and_comes_back(start: Start, pool: ThreadPoolExecutor):
    process = start(step_seconds=0.05)
    process.wait_ready()
    stream = process.stream(pool, max_tokens=400)
    plain = pool.submit(process.complete, max_tokens=400)
    process.wait_running(2)
    process.hold()
    os.kill(process.engine_pid(), signal.SIGKILL)
    *_, last = stream.result().split("\n\n")[:-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    refused(plain.result(), 503)
    assert process.status("/ready") == 503
    assert process.status("/health") == 200
    process.let_go()
    process.wait_ready()
    assert process.complete().status_code == 200
    metrics = process.get("/metrics").text
    assert "headrace_engine_restarts_total 1.0" in metrics


def test_an_engine_that_cannot_be_kept_alive_ends_the_server(start: Start, pool: ThreadPoolExecutor):
    process = start("--max-restarts", "0", step_seconds=0.02)
    process.wait_ready()
    os.kill(process.engine_pid(), signal.SIGKILL)
    assert process.ended() == 1


def test_a_model_that_does_not_start_ends_the_server(start: Start):
    process = start(fail_start="the file is torn")
    assert process.ended() == 1
    assert "headrace: error: the file is torn" in process.output()
    assert "Traceback" not in process.output()


def test_the_self_test_is_no_tenant_to_share_with():
    request = self_test()
    engine = Engine(config())
    message = AddRequest(
        request_id="self-test", prompt_token_ids=(0,), params=request.params, tenant=request.tenant, background=request.background, arrival=0.0
    )
    engine.add(message)
    engine.run()
    engine.add(core_request("first", 64, 4, arrival=engine.now, tenant="of a key"))
    engine.run()
    assert not engine.scheduler._turns.are_taken


def test_a_model_that_cannot_compute_is_never_ready(start: Start):
    process = start(nan_token=0)
    assert process.ended() == 1
    assert "a first token could not be computed" in process.output()
    assert "Traceback" not in process.output()


def test_a_signal_while_the_model_loads_ends_at_once(start: Start):
    process = start(held=True)
    process.until(lambda: process.status("/health") == 200)
    process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == 0
    assert "Traceback" not in process.output()


def test_a_busy_port_is_said_at_once(start: Start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = start(port=port, held=True)
        assert process.ended() == 1
        assert str(port) in process.output()
        assert "Traceback" not in process.output()


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"ssl_certfile": "/no/such.pem"}, "--ssl-certfile"),
        ({"host": "no.such.host.invalid"}, "--host"),
        ({"chat_template": "/no/such.jinja"}, "--chat-template"),
        ({"chat_template": "{% if %}"}, "chat template"),
    ],
)
def test_settings_that_cannot_work_end_the_start_with_a_word(tmp_path: Path, setting: dict[str, str], word: str):
    engine = EngineConfig(model=str(write_model(tmp_path)), runner_factory="tests.server.fakes:make_runner")
    with pytest.raises(StartError, match=word):
        run(engine, ServerConfig(**{"port": 0, **setting}), model_name="tiny")  # type: ignore[arg-type]


def test_listen_says_what_is_wrong():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port}"):
            listen("127.0.0.1", port)
    with listen("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


def test_a_chat_template_is_a_file_or_text(tmp_path: Path):
    (tmp_path / "a.jinja").write_text("from a file")
    assert read_template(str(tmp_path / "a.jinja")) == "from a file"
    assert read_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"b\.jinja"):
        read_template(str(tmp_path / "b.jinja"))


async def test_the_ready_message_shows_no_key(world: World):
    model = world.service.model()
    message = ready_message(world.service, model, url="http://h:1", secured=True)
    assert "Bearer YOUR_API_KEY" in message
    assert '"model": "tiny"' in message
    assert "path     fake" in message
    assert "page     http://h:1/, for browsers\n" in message
    assert ServerConfig().host == "127.0.0.1"  # nobody else can reach a server that was started without a word
