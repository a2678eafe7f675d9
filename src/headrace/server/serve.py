"""The serving process: port, engine, signals, and an orderly end.

The port is taken first, so that a wrong one is said at once; /health answers while the model loads, /ready only when it serves.
SIGTERM or SIGINT drains: new requests are turned away, running ones end. A second signal, or `shutdown_timeout`, ends those by force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
import uvloop

from headrace import __version__
from headrace.config import EngineConfig, ServerConfig
from headrace.engine.client import EngineClient
from headrace.engine.engine_process import LaunchedEngine
from headrace.engine.generation import GenerationRequest
from headrace.engine.generation import Generator as TextGenerator
from headrace.engine.heap import release_code_of_the_start, release_freed_memory
from headrace.errors import ConfigError, RequestError, StartError
from headrace.models.store import cache_root
from headrace.observe.tracing import Tracing
from headrace.sampling_params import SamplingParams
from headrace.server.app import create_app
from headrace.server.batch_service import BatchService
from headrace.server.logprobs import TokenTexts
from headrace.server.protocol import BoundedHttpProtocol
from headrace.server.ready_message import ready_message
from headrace.server.service import LoadedModel, Service
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats import TEXT_FORMAT

if TYPE_CHECKING:
    from headrace.server.open_inference.server import GrpcServer

KEEP_ALIVE_S = 75  # longer than clients' pools keep an idle connection
LAST_WRITES_S = 3  # for responses that are still being sent when all requests have ended
DEAD_CHECK_S = 0.5

logger = logging.getLogger("headrace.server")


def run(engine_config: EngineConfig, server_config: ServerConfig, *, model_name: str, launched: LaunchedEngine | None = None) -> int:
    """Serves until a signal comes; returns the exit code. Raises `StartError` if the server cannot start.

    `launched`: an engine of this config that loads already.
    """
    set_up_logging()
    port = listen(server_config.host, server_config.port)
    with contextlib.closing(port), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ServingProcess(engine_config, server_config, model_name, port, launched).run())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `StartError` that names the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"Cannot use --host {host}: {error.strerror or error}.") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartError(f"Cannot listen on {host} port {port}: {error.strerror or error}. Stop what uses it, or choose another --port.") from None
    listener.setblocking(False)
    return listener


def set_up_logging() -> None:
    """Our loggers to stderr, unless whoever embeds the server has set up logging."""
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what clients send wrongly is told to them
    ours = logging.getLogger("headrace")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Signals:
    """The first SIGTERM or SIGINT asks for the end, the second one for an end by force, the third one is obeyed on the spot."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.force = asyncio.Event()
        self.number = 0  # of the latest

    @contextlib.contextmanager
    def caught(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._caught, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _caught(self, number: int) -> None:
        self.number = number
        if self.force.is_set():
            os._exit(128 + number)
        (self.force if self.stop.is_set() else self.stop).set()


class Closes(Protocol):
    async def close(self) -> None: ...


async def end_of_service(http: uvicorn.Server, serving: asyncio.Task[None], service: Service, signals: Signals, parts: Iterable[Closes]) -> None:
    """Closes the parts in their order, then the port: every answer can tell its client how it ended, if the client reads, also by force."""
    for part in parts:
        await part.close()
    if signals.force.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITES_S):
                await service.admission.idle.wait()
        http.force_exit = True  # uvicorn waits for nobody
    http.should_exit = True
    await serving


def self_test() -> GenerationRequest:
    """One token for nobody: as a tenant's it would keep the steps of the first real tenant short, for half a minute."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return GenerationRequest(request_id="self-test", prompt_token_ids=(0,), params=params, background=True)


class ServingProcess:
    """Everything between the start and the end of `headrace serve`."""

    def __init__(
        self, engine_config: EngineConfig, server_config: ServerConfig, model_name: str, port: socket.socket, launched: LaunchedEngine | None = None
    ) -> None:
        self._launched = launched
        self._engine_config = engine_config
        self._config = server_config
        self._names = server_config.served_model_names or (model_name,)
        self._port = port
        self._generator: TextGenerator | None = None
        self._grpc_address: str | None = None

    async def run(self) -> int:
        self._signals = Signals()
        self._client = EngineClient(self._engine_config, max_restarts=self._config.max_restarts, launched=self._launched)
        limit = self._engine_config.max_num_seqs + self._engine_config.max_num_queued_reqs
        self._tracing = None if self._config.otlp_traces_endpoint is None else new_tracing(self._config.otlp_traces_endpoint)
        self._service = Service(config=self._config, engine=self._client, model_names=self._names, max_requests=limit, tracing=self._tracing)
        self._batches = BatchService(self._service, self._batch_folder(), max_lines=self._engine_config.max_num_seqs)
        http = HttpServer(self._uvicorn_config())
        with self._signals.caught(), contextlib.closing(self._service):
            async with self._grpc_port():
                await self._batches.start(must_open=self._config.batch_dir is not None)
                serving = asyncio.create_task(http.serve(sockets=[self._port]))
                try:
                    return await self._until_the_end(serving)
                finally:
                    # the engine's end ends what still runs with an error
                    await end_of_service(http, serving, self._service, self._signals, (self._batches, self._client))
                    if self._generator is not None:
                        self._generator.close()
                    if self._tracing is not None:
                        await asyncio.to_thread(self._tracing.close)

    @contextlib.asynccontextmanager
    async def _grpc_port(self) -> AsyncGenerator[None, None]:
        """Open from here to the end, where there is one."""
        if self._config.grpc_port is None:
            yield
            return
        server = new_grpc_server(self._service)
        try:
            self._grpc_address = await server.open(self._config.grpc_port)
            yield
        finally:
            await server.close(grace=0 if self._signals.force.is_set() else LAST_WRITES_S)

    async def _until_the_end(self, serving: asyncio.Task[None]) -> int:
        loading = asyncio.create_task(self._load())
        try:
            await first_of(loading, self._signals.stop.wait(), serving)
            if not loading.done():
                return 0
            await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        assert self._service.loaded is not None
        secured = bool(self._config.api_keys or self._config.limited_keys)
        print(ready_message(self._service, self._service.loaded, url=self._url(), grpc_address=self._grpc_address, secured=secured), flush=True)
        await first_of(self._signals.stop.wait(), self._engine_is_dead(), serving)
        if not self._signals.stop.is_set():
            logger.critical("the engine is dead for good; the server ends")
            return 1
        return await self._drain()

    async def _load(self) -> None:
        """The engine in its process and the tokenizer in a thread, both at once; then one token, to be sure that all of it works."""
        starting = asyncio.create_task(self._client.start())
        try:
            tokenizer, template = await asyncio.to_thread(self._load_words)
            generator = self._generator = TextGenerator(self._client, tokenizer)
            info = await starting
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        try:
            async for _ in generator.generate(self_test()):
                pass
        except RequestError as error:
            raise StartError(f"The model was loaded, but a first token could not be computed: {error}") from None
        self._service.loaded = LoadedModel(
            info=info,
            tokenizer=tokenizer,
            template=template,
            generator=generator,
            token_texts=TokenTexts(tokenizer),
            tool_call_parser=self._config.tool_call_parser,
            reasoning_parser=self._config.reasoning_parser,
        )
        release_freed_memory()
        release_code_of_the_start()

    def _load_words(self) -> tuple[Tokenizer, ChatTemplate]:
        release_code_of_the_start()  # before the vocabulary is loaded, which takes the most that this process ever holds
        tokenizer = Tokenizer.load(self._engine_config.model)
        given = self._config.chat_template
        template = ChatTemplate(tokenizer.chat_template if given is None else read_template(given), tokenizer)
        parser = self._config.tool_call_parser
        if not template.supports_tools and parser not in ("auto", TEXT_FORMAT):
            raise ConfigError(
                f"--tool-call-parser {parser}: the chat template knows no tools, so calls are asked for in the form {TEXT_FORMAT}; "
                "leave the flag out, or give a template with --chat-template."
            )
        return tokenizer, template

    async def _drain(self) -> int:
        """Turns new requests away and waits for those that run; 0 if all of them ended in time."""
        self._service.draining = True
        await self._batches.close()  # its lines can wait for the next start
        running = self._service.admission.active
        if running:
            logger.info("shutting down: %d requests may run for %g more seconds; a second signal ends them", running, self._config.shutdown_timeout)
        idle = self._service.admission.idle
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.shutdown_timeout):
                await first_of(idle.wait(), self._signals.force.wait())
        if idle.is_set():
            return 0
        logger.warning("ending %d requests that have not finished", self._service.admission.active)
        return 128 + self._signals.number if self._signals.force.is_set() else 0

    async def _engine_is_dead(self) -> None:
        while self._client.state != "dead":  # noqa: ASYNC110 - the client has no event for it, and half a second is soon enough
            await asyncio.sleep(DEAD_CHECK_S)

    def _uvicorn_config(self) -> uvicorn.Config:
        config = uvicorn.Config(
            create_app(self._service, self._batches),
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WRITES_S,
            ssl_certfile=self._config.ssl_certfile,
            ssl_keyfile=self._config.ssl_keyfile,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-certfile or --ssl-keyfile cannot be used: {error}.") from None
        return config

    def _batch_folder(self) -> Path:
        """The one that was given, or one that the next server of this model on this port finds again."""
        if self._config.batch_dir is not None:
            return Path(self._config.batch_dir).expanduser().absolute()
        name = re.sub(r"[^\w.-]+", "-", self._names[0])[:100]
        return cache_root() / "batches" / f"{name}-{self._port.getsockname()[1]}"

    def _url(self) -> str:
        host, port = self._port.getsockname()[:2]
        scheme = "https" if self._config.ssl_certfile else "http"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def new_grpc_server(service: Service) -> GrpcServer:
    """Its packages are an extra, and are loaded only where they are needed."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would write what strangers send into the log, byte by byte
    try:
        from headrace.server.open_inference.server import GrpcServer
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("grpc", "google", "grpc_health", "grpc_reflection"):
            raise
        raise ConfigError(f"--grpc-port needs packages that are not installed ({error.name}): pip install 'headrace[grpc]'.") from None
    return GrpcServer(service)


def new_tracing(endpoint: str) -> Tracing:
    """Its packages are an extra, and are loaded only where they are needed."""
    try:
        return Tracing(endpoint, version=__version__)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("opentelemetry", "google", "requests"):
            raise
        raise ConfigError(f"--otlp-traces-endpoint needs packages that are not installed ({error.name}): pip install 'headrace[otel]'.") from None


def read_template(given: str) -> str:
    """`--chat-template`: the path of a file, or the template itself."""
    if "{" in given:
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given} is no template and no file that can be read: {error}.") from None


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Returns when the first one is done. Coroutines are cancelled then; tasks go on."""
    mine = {asyncio.ensure_future(awaitable) for awaitable in awaitables if not isinstance(awaitable, asyncio.Future)}
    try:
        await asyncio.wait({*mine, *(item for item in awaitables if isinstance(item, asyncio.Future))}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
