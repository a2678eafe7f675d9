"""What flag values look like. Each function reads one text or raises `ValueError` that says what would be right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from headrace.config import SpeculativeConfig

T = TypeVar("T")
SIZE_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}  # as in vLLM: 8k is 8000, 8K is 8192
NUMBER = r"(\d+(?:\.\d+)?)"
DTYPE_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}


def size(text: str) -> int:
    """Bytes: "512MiB", "4GB", "2G" (= 2GiB), "1048576"."""
    return _size(text, unit="")


def size_in_gib(text: str) -> int:
    """Bytes; a number without a unit is in GiB, as in vLLM: "4", "512MiB"."""
    return _size(text, unit="G")


def otlp_endpoint(text: str) -> str:
    """The URL that takes traces; a collector's address alone gets the path that OTLP has for them."""
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("use the http:// or https:// URL of a collector's OTLP/HTTP port, such as http://localhost:4318")
    return url._replace(path="/v1/traces").geturl() if url.path in ("", "/") else text


def _size(text: str, *, unit: str) -> int:
    match = re.fullmatch(NUMBER + r"\s*([a-z]*)", text.strip(), re.IGNORECASE)
    factor = SIZE_UNITS.get((match[2] or unit).upper()) if match else None
    if match is None or factor is None:
        raise ValueError("use a number with a unit, such as 512MiB, 4GB or 2G")
    return int(float(match[1]) * factor)


def count(text: str) -> int:
    """A whole number; 8k is 8000 and 8K is 8192."""
    match = re.fullmatch(NUMBER + r"([kKmM]?)", text.strip())
    value = float(match[1]) * COUNT_UNITS[match[2]] if match else 0.5
    if not value.is_integer():
        raise ValueError("use a whole number, such as 4096, 8k (8000) or 8K (8192)")
    return int(value)


def counts(text: str) -> tuple[int, ...]:
    """Counts between commas, each once, ascending."""
    return tuple(sorted(set(listed(text, count))))


def listed(text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """Values between commas, each read for itself."""
    return tuple(read(part.strip()) for part in text.split(","))


def count_or_auto(text: str) -> int | None:
    """A count; "auto" leaves the choice to the model."""
    return None if text == "auto" else count(text)


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("use a whole number") from None


def port(text: str) -> int:
    value = integer(text)
    if not 0 <= value <= 65535:
        raise ValueError("use a port from 0 (any free one) to 65535")
    return value


def positive_integer(text: str) -> int:
    value = integer(text)
    if value < 1:
        raise ValueError("use a whole number of at least 1")
    return value


def seconds(text: str) -> float:
    """A length of time: 30, 2.5, 30s."""
    match = re.fullmatch(NUMBER + r"\s*s?", text.strip())
    if not match:
        raise ValueError("use a number of seconds, such as 30 or 2.5")
    return float(match[1])


def duration(text: str) -> float:
    """Seconds: 90, 90s, 10m, 1.5h."""
    match = re.fullmatch(NUMBER + r"\s*([smh]?)", text.strip())
    if not match or not float(match[1]):
        raise ValueError("use a time such as 90s, 10m or 1.5h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def positive_number(text: str) -> float:
    match = re.fullmatch(NUMBER, text.strip())
    if not match or not float(match[1]):
        raise ValueError("use a number above 0")
    return float(match[1])


def number(text: str) -> float:
    """Any finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError("use a number")
    return value


def boolean(text: str) -> bool:
    """For config files, where `true` arrives as the word True."""
    if text.lower() not in ("true", "false"):
        raise ValueError("use true or false")
    return text.lower() == "true"


def texts(text: str) -> tuple[str, ...]:
    """A JSON list of strings (as vLLM takes it), or texts between commas."""
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise ValueError("use a JSON list of strings, such as '[\"https://app.example\"]', or texts between commas")
    return tuple(value)


def dtype(text: str) -> str:
    name = DTYPE_ALIASES.get(text, text)
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError("use auto, float32, bfloat16 or float16")
    return name


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError("use auto, cpu, cuda or cuda:N")
    return text


def speculative_config(text: str) -> SpeculativeConfig:
    """A JSON object, as vLLM takes it."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError('use a JSON object, such as \'{"method": "ngram", "num_speculative_tokens": 4}\'')
    return SpeculativeConfig.parse(value)


def activation_bits(text: str) -> int:
    if text not in ("8", "16"):
        raise ValueError("use 8 or 16")
    return int(text)


def quantization(text: str) -> str:
    if text not in ("none", "gguf", "int8", "int4"):
        raise ValueError("use none, gguf, int8 or int4")
    return text
