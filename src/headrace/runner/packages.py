"""What a compiled package depends on, and the form in which it is kept where others can write.

A package is code: loading one runs it. It is loaded only where every fact it depends on is the same here, and where its bytes are whole. In
a store that others may write to, `SECRET_VARIABLE` holds a secret that all workers share: entries are signed with it, and an unsigned or
foreign one is refused like a torn one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn

from headrace.kernels import cpu
from headrace.kernels.cpu.build import SOURCES, cpu_flags
from headrace.runner.buckets import Bucket
from headrace.runner.step_module import StepModule, StepShape

SECRET_VARIABLE = "HEADRACE_CACHE_SECRET"
FORMAT = "1"
_MAGIC = b"headrace package\n"
# Python whose change may change a graph
_CODE = (
    "kernels/attention.py",
    "kernels/cpu/__init__.py",
    "models/decoder.py",
    "models/layer_runs.py",
    "models/layers.py",
    "models/packed.py",
    "models/rope.py",
    "runner/compile_worker.py",
    "runner/step_module.py",
)

Facts = dict[str, str]


class PackageRefused(Exception):
    """The package is torn, foreign or not signed. The message says which, and never loads it."""


def service_facts(module: StepModule, shape: StepShape, kernels: cpu.CpuKernels, flags: Mapping[str, object]) -> Facts:
    """What all packages of a service have in common, by names that a refusal can use."""
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "platform": platform_name(),
        "instruction set": kernels.isa,
        "processor": " ".join(vector_flags()),
        "kernels": source_hash(),
        "code": code_hash(),
        "model": model_hash(module),
        "static length": str(shape.static_length),
        "block size": str(shape.block_size),
        "KV dtype": shape.kv_dtype,
        "flags": json.dumps(flags, sort_keys=True),
    }


def package_facts(common: Facts, bucket: Bucket) -> Facts:
    return common | {"bucket": bucket.name, "rows": str(bucket.num_rows)}


def key_of(facts: Facts) -> str:
    """The name of a package with these facts in a store."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def compare(found: Mapping[str, str], wanted: Facts) -> None:
    """Raises `PackageRefused` that names the first fact which differs. A processor may have more than the package's."""
    for name, here in wanted.items():
        there = found.get(name)
        if name == "processor" and there is not None and set(there.split()) <= set(here.split()):
            continue
        if there != here:
            shown = f"is {_short(here)} here and {_short(there)} there" if name != "processor" else "is of another generation"
            raise PackageRefused(f"its {name} {shown}")


def seal(facts: Facts, body: bytes, secret: bytes | None) -> bytes:
    """The bytes of a store's entry."""
    header: dict[str, object] = {"facts": facts, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    if secret is not None:
        header["signature"] = _signature(header, secret)
    line = _canonical(header)
    return _MAGIC + len(line).to_bytes(4, "little") + line + body


def unseal(entry: bytes, wanted: Facts, secret: bytes | None) -> bytes:
    """The package in an entry. Raises `PackageRefused`."""
    begin = len(_MAGIC) + 4
    if not entry.startswith(_MAGIC) or len(entry) < begin:
        raise PackageRefused("it is no package of ours")
    end = begin + int.from_bytes(entry[len(_MAGIC) : begin], "little")
    try:
        header = json.loads(entry[begin:end])
        facts, size, digest = dict(header["facts"]), int(header["size"]), str(header["sha256"])
        if _canonical(header) != entry[begin:end]:
            raise ValueError("not as we write it")  # a tab for a blank is the same JSON, but nothing that seal() writes
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PackageRefused("its header is torn") from error
    body = entry[end:]
    if len(body) != size:
        raise PackageRefused(f"it is torn: {len(body)} of {size} bytes")
    if hashlib.sha256(body).hexdigest() != digest:
        raise PackageRefused("its checksum is wrong")
    if secret is not None:
        signature = header.pop("signature", None)
        if not isinstance(signature, str) or not hmac.compare_digest(signature.encode(), _signature(header, secret).encode()):
            raise PackageRefused(f"it is not signed with the secret of ${SECRET_VARIABLE}")
    compare(facts, wanted)
    return body


def platform_name() -> str:
    return f"{sys.platform}-{platform.machine()}"


def secret() -> bytes | None:
    """The workers' shared secret, if they have one."""
    return os.environ.get(SECRET_VARIABLE, "").encode() or None


def model_hash(module: StepModule) -> str:
    """Of all of a model that its graph depends on: settings, and the weights' names, shapes and formats. Not of the weights' values: those
    are lent to a package when it is loaded, so a fine-tuned model shares the packages of its base."""
    digest = hashlib.sha256(repr(module.model.config).encode())
    for name, tensor in sorted(module.constants().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    for name, part in module.model.named_modules():
        digest.update(f"{name} {type(part).__qualname__} {_plain_attributes(part)}\n".encode())
    return digest.hexdigest()


@cache
def source_hash() -> str:
    """Of the kernels' C++ sources."""
    return _files_hash(tuple(sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))))


@cache
def code_hash() -> str:
    root = Path(__file__).parent.parent
    return _files_hash(tuple(root / name for name in _CODE))


def vector_flags() -> list[str]:
    """What this processor offers of instructions that compilers choose by themselves."""
    prefixes = ("avx", "amx", "fma", "f16c", "sse4", "bmi", "asimd", "sve", "bf16", "i8mm")
    return sorted(flag for flag in cpu_flags() if flag.startswith(prefixes))


def _files_hash(files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _plain_attributes(part: nn.Module) -> list[tuple[str, object]]:
    kinds = (bool, int, float, str, type(None), torch.dtype)
    return sorted((name, str(value)) for name, value in vars(part).items() if isinstance(value, kinds) and name != "training")


def _signature(header: Mapping[str, object], secret: bytes) -> str:
    """The header holds the body's checksum, so it stands for all of the entry."""
    return hmac.new(secret, _canonical(header), hashlib.sha256).hexdigest()


def _canonical(header: Mapping[str, object]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()


def _short(value: str | None) -> str:
    text = "unknown" if value is None else value
    return text if len(text) <= 40 else f"{text[:12]}..."
