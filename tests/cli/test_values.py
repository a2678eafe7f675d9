from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.cli import values


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (values.size, "1048576", 1 << 20),
        (values.size, "512MiB", 512 << 20),
        (values.size, "4GB", 4 * 10**9),
        (values.size, "4 gb", 4 * 10**9),
        (values.size, "1.5g", 3 << 29),
        (values.size, "0", 0),
        (values.size_in_gib, "4", 4 << 30),
        (values.size_in_gib, "0.5", 1 << 29),
        (values.size_in_gib, "512MiB", 512 << 20),
        (values.count, "4096", 4096),
        (values.count, "8k", 8000),
        (values.count, "8K", 8192),
        (values.count, "1.5k", 1500),
        (values.count_or_auto, "auto", None),
        (values.count_or_auto, "8k", 8000),
        (values.integer, "-3", -3),
        (values.port, "0", 0),
        (values.seconds, "30", 30.0),
        (values.seconds, "2.5s", 2.5),
        (values.positive_number, "0.9", 0.9),
        (values.number, "-0.5", -0.5),
        (values.boolean, "True", True),
        (values.boolean, "false", False),
        (values.texts, '["https://a.example", "b"]', ("https://a.example", "b")),
        (values.texts, "https://a.example, b", ("https://a.example", "b")),
        (values.texts, "*", ("*",)),
        (values.texts, "[]", ()),
        (values.dtype, "half", "float16"),
        (values.dtype, "bfloat16", "bfloat16"),
        (values.device, "cuda:1", "cuda:1"),
        (values.activation_bits, "16", 16),
        (values.quantization, "none", "none"),
        (values.quantization, "gguf", "gguf"),
        (values.quantization, "int4", "int4"),
    ],
)
def test_good_values(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "advice"),
    [
        (values.size, "lots", "512MiB"),
        (values.size, "-1", "512MiB"),
        (values.size, "4 furlongs", "512MiB"),
        (values.count, "minus", "8192"),
        (values.count, "1.5", "whole number"),
        (values.count, "-1", "whole number"),
        (values.count, "8g", "whole number"),
        (values.integer, "1.0", "whole number"),
        (values.positive_integer, "0", "at least 1"),
        (values.port, "65536", "65535"),
        (values.seconds, "soon", "seconds"),
        (values.seconds, "-1", "seconds"),
        (values.positive_number, "0", "above 0"),
        (values.number, "nan", "number"),
        (values.number, "hot", "number"),
        (values.boolean, "yes", "true or false"),
        (values.texts, '["a", 1]', "JSON list of strings"),
        (values.texts, '["a"', "JSON list of strings"),
        (values.dtype, "int8", "float32"),
        (values.device, "tpu", "cuda"),
        (values.activation_bits, "4", "8 or 16"),
        (values.quantization, "awq", "none, gguf, int8 or int4"),
    ],
)
def test_bad_values_say_what_is_right(read: Callable[[str], Any], text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        read(text)
