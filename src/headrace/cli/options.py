"""The flags of `headrace serve` as one table: each row is a flag, a key of the config file and a field of a config."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from headrace.cli import values
from headrace.cli.key_file import api_keys_file
from headrace.config import EngineConfig, ServerConfig
from headrace.text import reasoning, tool_formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    flag: str  # without the dashes; the config file takes it with - or _
    owner: type[EngineConfig] | type[ServerConfig]
    field: str
    read: Callable[[str], Any]  # from text, on the command line and in the file; raises ValueError
    help: str
    metavar: str = "N"
    choices: tuple[str, ...] | None = None
    many: bool = False  # several values, a tuple in the config
    aliases: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        return self.read is values.boolean

    @property
    def names(self) -> tuple[str, ...]:
        return (self.flag, *self.aliases)

    @property
    def default(self) -> object:
        return {field.name: field.default for field in dataclasses.fields(self.owner)}[self.field]


def _engine(flag: str, read: Callable[[str], Any], help: str, *, field: str | None = None, **rest: Any) -> Option:
    return Option(flag=flag, owner=EngineConfig, field=field or flag.replace("-", "_"), read=read, help=help, **rest)


def _server(flag: str, read: Callable[[str], Any], help: str, *, field: str | None = None, **rest: Any) -> Option:
    return Option(flag=flag, owner=ServerConfig, field=field or flag.replace("-", "_"), read=read, help=help, **rest)


MODEL_OPTIONS = (
    _engine("dtype", values.dtype, "type of weights and of what is computed; auto: float32 on CPU, the checkpoint's on CUDA", metavar="TYPE"),
    _engine(
        "quantization",
        values.quantization,
        "on CPU, gguf: compute with the blocks of a GGUF file as they are; int8, int4: round the weights of any model when they are loaded; "
        "none: weights are floats of --dtype; default: gguf for a GGUF file on CPU where --dtype is auto, else none",
        metavar="KIND",
    ),
    _engine(
        "activation-bits",
        values.activation_bits,
        "bits of activations in products with quantised weights on CPU: 16 rounds a hundredth as much in up to twice the time; default: 8",
        metavar="8|16",
    ),
    _engine("max-model-len", values.count_or_auto, "most tokens of prompt and answer together; 8k is 8000, 8K is 8192; auto: the model's own limit"),
    _engine("device", values.device, "auto, cpu, cuda or cuda:N", metavar="DEVICE"),
    _engine("threads", values.positive_integer, "compute threads; default: one per physical core"),
    _engine("seed", values.integer, "seed of requests that bring none; default: a fresh one for each"),
    _engine("deterministic", values.boolean, "the same tokens whatever the batch, in every dtype; slower"),
)
MEMORY_OPTIONS = (
    _engine(
        "kv-memory",
        values.size,
        "room for keys and values, taken once at the start: 512MiB, 4GB; default: 512MiB on CPU, the rest of --gpu-memory-utilization on CUDA",
        metavar="SIZE",
        aliases=("kv-cache-memory-bytes",),
    ),
    _engine(
        "kv-cache-dtype",
        values.dtype,
        "type of keys and values in store; auto: float16 on CPU beside weights in GGUF blocks, int8 or int4, else the type of --dtype",
        metavar="TYPE",
    ),
    _engine("gpu-memory-utilization", values.positive_number, "share of a CUDA device that weights, KV and work space may take", metavar="SHARE"),
    _engine("block-size", values.positive_integer, "tokens in a KV block"),
    _engine("num-gpu-blocks-override", values.positive_integer, "exactly so many KV blocks, whatever the memory"),
    _engine("swap-space", values.size_in_gib, "host memory for preempted requests: 4 (GiB) or 512MiB; 0: recompute them", metavar="SIZE"),
    _engine("enable-prefix-caching", values.boolean, "reuse the blocks of prompts that begin alike"),
    _engine(
        "session-lease",
        values.seconds,
        "how long a session_id keeps its blocks ahead of others after its last turn",
        field="session_lease_s",
        metavar="SECONDS",
    ),
    _engine("session-dir", str, "folder that keeps the blocks of leased sessions over a restart; default: none", metavar="DIR"),
    _engine("session-quota", values.size, "bytes that sessions may take there; those used last are kept", metavar="SIZE"),
)
SCHEDULER_OPTIONS = (
    _engine("max-num-seqs", values.count, "requests that run at the same time"),
    _engine("max-num-batched-tokens", values.count, "most tokens in one step, prompts and answers together"),
    _engine("max-num-queued-reqs", values.count, "requests that may wait; one more is answered 429 with Retry-After"),
    _engine(
        "scheduling-policy",
        str,
        "fcfs: first come, first served; priority: the request's priority field first",
        choices=("fcfs", "priority"),
        metavar="POLICY",
    ),
    _engine("preemption-mode", str, "how a request gives up its blocks when they run out", choices=("auto", "recompute", "swap"), metavar="MODE"),
    _engine("enable-chunked-prefill", values.boolean, "split long prompts over steps, so that running answers go on"),
    _engine(
        "target-itl-ms",
        values.positive_number,
        "time between tokens to hold while prompts are read; default: twice the undisturbed step and what any prompt costs, more for several",
        metavar="MS",
    ),
    _engine("async-scheduling", values.boolean, "plan the next step while this one runs"),
    _engine(
        "speculative-config",
        values.speculative_config,
        "guess tokens that stood in the prompt or the answer before: JSON with method (ngram), num_speculative_tokens (4), prompt_lookup_max (4), "
        "prompt_lookup_min (2); answers stay the same; default: off",
        metavar="JSON",
    ),
    _engine(
        "step-timeout", values.seconds, "a step that takes longer is stuck, and the engine is restarted", field="step_timeout_s", metavar="SECONDS"
    ),
    _engine("runner-factory", str, "package.module:function that makes another runner, for tests and simulation", metavar="NAME"),
)
COMPILE_OPTIONS = (
    _engine(
        "compile",
        str,
        "prepare faster paths in the background while the ready path serves; auto: decode steps and short prompts, where it pays; full: all steps",
        choices=("off", "auto", "full"),
        metavar="MODE",
    ),
    _engine(
        "compile-cache",
        str,
        "where compiled packages are kept for other workers: a folder, redis://... or a URL that fsspec knows; default: a folder of this user",
        metavar="PLACE",
    ),
    _engine("artifacts", str, "folder of `headrace compile`: serve with what lies there, without a compiler", metavar="DIR"),
    _engine("max-seq-len-to-capture", values.count, "longest context of a compiled step; longer ones take the ready path"),
)
SERVER_OPTIONS = (
    _server("host", str, "address to listen on; 0.0.0.0: every interface", metavar="ADDRESS"),
    _server("port", values.port, "port to listen on; 0: any free one"),
    _server("grpc-port", values.port, "port for the Open Inference Protocol over gRPC; 0: any free one; needs headrace[grpc]; default: none"),
    _server(
        "served-model-name", str, "names that clients may use; the first one is in the answers", field="served_model_names", metavar="NAME", many=True
    ),
    _server("chat-template", str, "file or text that replaces the model's chat template", metavar="TEMPLATE"),
    _server(
        "tool-call-parser",
        str,
        "how the model writes calls of tools; auto: as its chat template shows",
        choices=("auto", *sorted(tool_formats.FORMATS)),
        metavar="NAME",
    ),
    _server(
        "reasoning-parser",
        str,
        "how the model marks its reasoning, which is then told from content; auto: as its chat template shows",
        choices=("auto", "none", *sorted(reasoning.FORMATS)),
        metavar="NAME",
    ),
    _server("trust-request-chat-template", values.boolean, "let requests bring their own chat_template"),
    _server("shutdown-timeout", values.seconds, "seconds that running requests may take after SIGTERM; a second SIGTERM forces", metavar="SECONDS"),
    _server("max-body-size", values.size, "largest request body; a larger one is answered 413", field="max_body_bytes", metavar="SIZE"),
    _server("body-timeout", values.seconds, "seconds a client may take to send its request", metavar="SECONDS"),
    _server("max-restarts", values.count, "engine restarts within ten minutes before the process gives up"),
    _server(
        "batch-dir",
        str,
        "folder of files and batches, one server's own; default: batches/MODEL-PORT under $HEADRACE_HOME, made when it is needed",
        metavar="FOLDER",
    ),
    _server("max-file-size", values.size, "largest file that /v1/files takes", field="max_file_bytes", metavar="SIZE"),
    _server(
        "pooling",
        str,
        "what an embedding is made of: the hidden state of the last token, or the mean of all",
        choices=("last", "mean"),
        metavar="KIND",
    ),
    _server("web", values.boolean, "serve the web page at /: chat, and a live view of the engine"),
    _server(
        "otlp-traces-endpoint",
        values.otlp_endpoint,
        "collector that takes a trace of each request over OTLP/HTTP, such as http://localhost:4318; needs headrace[otel]; default: none",
        metavar="URL",
    ),
    _server("enable-log-requests", values.boolean, "log each request: id, tokens, times; never its text", field="log_requests"),
)
SECURITY_OPTIONS = (
    _server(
        "api-key",
        str,
        "key that clients must send as a bearer token; may be given again; default: $HEADRACE_API_KEY",
        field="api_keys",
        metavar="KEY",
        many=True,
    ),
    _server(
        "api-keys-file",
        api_keys_file,
        "YAML list of keys, each with name, key and, where wanted, requests_per_minute, tokens_per_minute and priority",
        field="limited_keys",
        metavar="FILE",
    ),
    _server(
        "allowed-origins",
        values.texts,
        "web origins that browsers may call from: a JSON list or texts between commas; * allows all",
        metavar="ORIGINS",
    ),
    _server("ssl-certfile", str, "certificate of the server (PEM); turns HTTPS on", metavar="FILE"),
    _server("ssl-keyfile", str, "private key of the certificate (PEM)", metavar="FILE"),
)
ENGINE_GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (
    ("model", MODEL_OPTIONS),
    ("memory", MEMORY_OPTIONS),
    ("scheduler", SCHEDULER_OPTIONS),
    ("compile", COMPILE_OPTIONS),
)
SERVE_GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (*ENGINE_GROUPS, ("server", SERVER_OPTIONS), ("security", SECURITY_OPTIONS))


def add_options(parser: argparse.ArgumentParser, groups: Iterable[tuple[str, tuple[Option, ...]]]) -> None:
    """Add the flags of the table. A flag that is not given leaves no trace in the namespace, so that a config file may set it."""
    for title, options in groups:
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)


def _add(group: Any, option: Option) -> None:
    rest: dict[str, Any] = {"dest": option.flag.replace("-", "_"), "default": argparse.SUPPRESS, "help": _help(option)}
    if option.is_switch:
        rest["action"] = argparse.BooleanOptionalAction
    else:
        rest |= {"type": reader(option.read), "metavar": option.metavar, "choices": option.choices}
        if option.many:
            # --api-key takes one value each time: with more, a model named after it would become a key
            rest |= {"action": "append"} if option.flag == "api-key" else {"nargs": "+"}
    group.add_argument(*(f"--{name}" for name in option.names), **rest)


def reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse hides the words of a ValueError; ours say what would be right."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not right here: {error}") from None

    return convert


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if option.choices:
        text = f"{text} ({', '.join(option.choices)})"
    if "default:" in text or option.default is None or option.default == ():
        return text
    return f"{text} (default: {_shown(option)})"


def _shown(option: Option) -> str:
    value = option.default
    if option.is_switch:
        return "on" if value else "off"
    if option.read is values.size and isinstance(value, int):
        return f"{value >> 20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)
