"""Settings of a whole process, as frozen values. `resolve()` happens once; nothing changes a config after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from headrace.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
PathState = Literal["ready", "compiling", "compiled", "failed", "retired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding; names and meaning as in vLLM. Raises `ConfigError`, which names the key."""

    method: Literal["ngram"] = "ngram"  # prompt lookup: what followed the last tokens before is guessed to follow again
    num_speculative_tokens: int = 4  # most guesses of a request in a step
    prompt_lookup_max: int = 4  # the longest and
    prompt_lookup_min: int = 2  # the shortest run of last tokens that is looked up

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(f"speculative_config: method {self.method!r} is not known; use ngram.")
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
                raise ConfigError(f"speculative_config: {name} must be a whole number from 1 to 64, not {value!r}.")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max ({self.prompt_lookup_max})."
            )

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """From keys and values. Of the two lengths of a lookup, one that is not given keeps to the other."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"speculative_config has an unknown key {unknown[0]!r}; use {', '.join(field.name for field in fields(cls))}.")
        given = dict(values)
        ends = ("prompt_lookup_min", "prompt_lookup_max")
        for name, other in (ends, ends[::-1]):
            if name not in given and other in given:
                given[name] = given[other]
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine process needs. Field names are the flags of `headrace serve` with - for _."""

    model: str  # local directory or GGUF file, already resolved by models.store.resolve_model
    dtype: DType = "auto"  # auto: float32 on CPU, the checkpoint's on CUDA
    # On CPU. gguf: weights of a GGUF file stay in their blocks; int8, int4: those of any model are rounded when loaded; none: they are
    # floats of dtype; None: gguf for a GGUF file with dtype auto, else none
    quantization: Literal["none", "gguf", "int8", "int4"] | None = None
    activation_bits: Literal[8, 16] | None = None  # in products with weights in blocks or few bits on CPU; None: 8
    kv_cache_dtype: DType = "auto"  # of keys and values; auto: float16 beside weights in blocks or few bits on CPU, else the model's dtype
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    max_model_len: int | None = None  # None: the model's own limit
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048  # most tokens in one step
    block_size: int = 16  # tokens in a KV block
    kv_memory: int | None = None  # bytes of KV storage; None: a share of free memory (512 MiB on CPU)
    gpu_memory_utilization: float = 0.9  # CUDA: share of the device that weights, KV and work space may take
    num_gpu_blocks_override: int | None = None  # exactly so many KV blocks, whatever the memory
    swap_space: int = 0  # bytes of host memory for swapped requests; 0: preemption recomputes
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"  # auto: swap where there is room and it is cheaper
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_queued_reqs: int = 1024  # requests that may wait; one more gets 429
    target_itl_ms: float | None = None  # inter-token latency held beside prompts; None: twice the decode-only step, more beside many prompts
    session_lease_s: float = 300.0  # how long the blocks of a session_id are kept ahead of others after its last turn
    session_dir: str | None = None  # where the leased sessions' blocks are kept from an orderly end to the next start
    session_quota: int = 4 * 1024**3  # bytes that they may take there
    async_scheduling: bool = True  # plan step n+1 while step n runs
    speculative_config: SpeculativeConfig | None = None  # None: no speculation
    deterministic: bool = False  # same ids whatever the batch, in every dtype; slower
    seed: int | None = None  # of requests that bring none; None: fresh for each
    compile: Literal["off", "auto", "full"] = "off"  # prepare faster paths in the background; auto: where it pays, full: for all steps
    compile_cache: str | None = None  # folder, redis:// or fsspec URL where compiled packages are kept; None: a folder of this user
    artifacts: str | None = None  # folder of `headrace compile`
    max_seq_len_to_capture: int = 8192  # longest context of compiled steps; longer ones take the ready path
    tenant_weights: tuple[tuple[str, float], ...] = ()  # (tenant, weight) of keys whose weight is not 1; made from --api-keys-file
    threads: int | None = None  # compute threads; None: one per physical core available
    step_timeout_s: float = 120.0  # a step that takes longer is stuck: the engine is restarted
    runner_factory: str | None = None  # "package.module:function" that makes another runner (tests, simulation)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_seq_len_to_capture"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}.")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"--max-model-len must be at least 1, not {self.max_model_len}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs ({self.max_num_seqs}): "
                "a step must hold one token of every running request."
            )
        if self.max_num_queued_reqs < 0:
            raise ConfigError(f"--max-num-queued-reqs must not be negative, not {self.max_num_queued_reqs}.")
        if self.compile not in ("off", "auto", "full"):
            raise ConfigError(f"--compile {self.compile} is not known; use off, auto or full.")
        if self.session_dir is not None and not self.enable_prefix_caching:
            raise ConfigError("--session-dir keeps blocks of the prefix cache: leave --enable-prefix-caching on, or leave --session-dir out.")
        if self.quantization not in (None, "none", "gguf", "int8", "int4"):
            raise ConfigError(f"--quantization {self.quantization} is not known; use none, gguf, int8 or int4.")
        if self.activation_bits not in (None, 8, 16):
            raise ConfigError(f"--activation-bits must be 8 or 16, not {self.activation_bits}.")
        if self.kv_cache_dtype not in get_args(DType):
            raise ConfigError(f"--kv-cache-dtype {self.kv_cache_dtype} is not known; use auto, float32, float16 or bfloat16.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], not {self.gpu_memory_utilization}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler decides with; made by the engine once the model and the KV storage are known."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int  # device blocks
    num_host_blocks: int = 0  # room for swapped blocks
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_queued_reqs: int = 1024
    target_itl_ms: float | None = None
    session_lease_s: float = 300.0
    speculative_config: SpeculativeConfig | None = None
    tenant_weights: tuple[tuple[str, float], ...] = ()  # (tenant, weight), of others it is 1: how tokens, slots and blocks are shared out


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine tells its clients."""

    model: str
    max_model_len: int
    vocab_size: int
    embedding_size: int  # numbers in the vector of an embedding
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    threads: int
    path: str  # which execution path serves: "eager", with what differs from it
    kv_cache_dtype: str
    kv_bytes: int
    weight_bytes: int
    load_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStatus:
    """What has become of one prepared path; see `runner.paths` for the states."""

    name: str  # kind and tokens of its steps: "decode-8", "mixed-256"
    state: PathState
    reason: str | None = None  # why it failed or was retired


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileStatus:
    """How far the preparation of faster paths is, and what they have served. Totals count up and never fall."""

    mode: Literal["off", "auto", "full"]
    state: PathState  # of all paths together; ready: nothing is prepared
    reason: str | None = None  # why nothing is prepared, or why a path failed
    paths: tuple[PathStatus, ...] = ()
    compiled_steps_total: int = 0
    general_steps_total: int = 0  # steps on the ready path, which takes any
    padded_tokens_total: int = 0  # computed in compiled steps only to fill a static shape
    compiled_tokens_total: int = 0  # computed in compiled steps for a request
    compilations_total: int = 0  # packages compiled for this service
    recompiles_total: int = 0  # compilations beyond the first of a path: stays at 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key of a client, and what it may use. Raises `ConfigError`, which names the field."""

    name: str  # what logs call it
    key: str = field(repr=False)
    requests_per_minute: int | None = None  # None: no limit
    tokens_per_minute: int | None = None  # prompts and answers together
    priority: int | None = None  # its requests are no more urgent than this (lower runs first)
    weight: float = 1.0  # its part of tokens, slots and blocks against that of others

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.@-]{1,64}", self.name, re.ASCII):
            raise ConfigError("name must be 1 to 64 letters, digits or any of . _ @ -")
        if not isinstance(self.key, str) or not re.fullmatch(r"[!-~]+", self.key):
            raise ConfigError(f"{self.name}: key must be a text of visible ASCII characters")
        for limit in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, limit)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31):
                raise ConfigError(f"{self.name}: {limit} must be a whole number of at least 1")
        if self.priority is not None and (isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) >= 2**31):
            raise ConfigError(f"{self.name}: priority must be a whole number")
        if isinstance(self.weight, bool) or not isinstance(self.weight, (int, float)) or not 0.01 <= self.weight <= 100:
            raise ConfigError(f"{self.name}: weight must be a number from 0.01 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the HTTP process needs."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  # None: no gRPC; 0: any free one
    api_keys: tuple[str, ...] = ()  # without limits
    limited_keys: tuple[ApiKey, ...] = ()  # if there are no keys of both kinds, none is asked for
    allowed_origins: tuple[str, ...] = ()  # CORS; "*" allows all
    served_model_names: tuple[str, ...] = ()  # the first is the one in answers; empty: derived from the model
    chat_template: str | None = None  # path or text that replaces the model's own
    tool_call_parser: str = "auto"  # how the model writes calls of tools; auto: as its chat template shows
    reasoning_parser: str = "auto"  # how it marks its reasoning; auto: as its chat template shows; none: reasoning is not told from content
    shutdown_timeout: float = 30.0  # seconds that running requests may take after SIGTERM
    max_body_bytes: int = 8 * 1024 * 1024  # decoding more in one go would hold up all streams, and the texts of a few million tokens fit
    body_timeout: float = 60.0  # seconds a client may take to send its request
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    trust_request_chat_template: bool = False
    max_restarts: int = 5  # engine restarts within ten minutes before the process gives up
    log_requests: bool = False
    otlp_traces_endpoint: str | None = None  # URL that takes spans over OTLP/HTTP; None: none are made
    batch_dir: str | None = None  # None: a folder of the model and port under $HEADRACE_HOME, made when the first file comes
    max_file_bytes: int = 512 * 1024 * 1024
    pooling: Literal["last", "mean"] = "last"  # how an embedding is made of a prompt's hidden states
    web: bool = True  # the page at /
