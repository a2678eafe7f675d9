"""The GGUF reader on files that are well, torn, or hostile."""

from __future__ import annotations

import contextlib
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelLoadError
from headrace.models.gguf import GGUFFile

VALUES = {
    "a.u8": (np.uint8(7), gguf.GGUFValueType.UINT8),
    "a.i16": (-3, gguf.GGUFValueType.INT16),
    "a.u32": (1 << 31, gguf.GGUFValueType.UINT32),
    "a.i64": (-(1 << 60), gguf.GGUFValueType.INT64),
    "a.f32": (0.5, gguf.GGUFValueType.FLOAT32),
    "a.f64": (1e-300, gguf.GGUFValueType.FLOAT64),
    "a.flag": (True, gguf.GGUFValueType.BOOL),
    "a.text": ("Grüße, 水", gguf.GGUFValueType.STRING),
    "a.texts": (["a", "", "水"], gguf.GGUFValueType.ARRAY),
    "a.numbers": ([1, 2, 3], gguf.GGUFValueType.ARRAY),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, kind) in VALUES.items():
        writer.add_key_value(key, value, kind)
    writer.add_tensor("matrix", np.arange(96, dtype=np.float32).reshape(3, 32))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors(file):
    read = GGUFFile(file)
    texts = read.metadata["a.texts"]
    assert (len(texts), texts[2], texts[-1:], "" in texts) == (3, "水", ["水"], True)
    read.metadata["a.texts"] = list(texts)
    assert {key: read.metadata[key] for key in VALUES} == {key: value for key, (value, _) in VALUES.items()}
    assert [(t.name, t.shape, t.type_name) for t in read.tensors.values()] == [("matrix", (3, 32), "F32"), ("vector", (5,), "F16")]
    assert read.dequantize("matrix").tolist() == np.arange(96).reshape(3, 32).tolist()
    assert read.dequantize("vector").tolist() == [0, 1, 2, 3, 4]


def test_a_text_of_a_list_that_is_no_utf_8_is_told_when_it_is_read(file):
    data = file.read_bytes()
    assert data.count("水".encode()) == 2
    file.write_bytes(data[: data.rindex("水".encode())] + b"\xff\xfe\xff" + data[data.rindex("水".encode()) + 3 :])
    texts = GGUFFile(file).metadata["a.texts"]
    with pytest.raises(ModelLoadError, match="UTF-8"):
        list(texts)


def test_version_2_reads_alike(file):
    data = bytearray(file.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    file.write_bytes(data)
    assert GGUFFile(file).metadata["a.text"] == "Grüße, 水"


@pytest.mark.parametrize(("version", "hint"), [(1, "convert it again"), (4, "convert it again"), (3 << 24, "big endian")])
def test_other_versions_are_named(file, version, hint):
    data = bytearray(file.read_bytes())
    data[4:8] = struct.pack("<I", version)
    file.write_bytes(data)
    with pytest.raises(ModelLoadError, match=hint):
        GGUFFile(file)


def test_a_file_torn_anywhere_is_named(file):
    data = file.read_bytes()
    end = GGUFFile(file).tensors["vector"]
    for size in range(end.offset + end.num_bytes):
        file.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match=r"small\.gguf"):
            GGUFFile(file)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "zip.gguf").write_bytes(b"PK" * 50)
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        GGUFFile(tmp_path / "zip.gguf")


def _header(tensors: int, metadata: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, metadata) + rest


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _tensor(name: bytes, dims: list[int], kind: int, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)


NESTED = struct.pack("<IQ", 9, 1) * 100_000
HOSTILE = {
    "counts": _header(1 << 60, 1 << 60, b""),
    "metadata count": _header(0, 1 << 40, bytes(100)),
    "long text": _header(0, 1, struct.pack("<Q", 1 << 62) + bytes(50)),
    "long array": _header(0, 1, _text(b"k") + struct.pack("<IIQ", 9, 0, 1 << 62) + bytes(50)),
    "array of texts": _header(0, 1, _text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 23) + bytes(50)),
    "deep array": _header(0, 1, _text(b"k") + struct.pack("<I", 9) + NESTED),
    "unknown type": _header(0, 1, _text(b"k") + struct.pack("<I", 13) + bytes(50)),
    "no utf-8": _header(0, 1, _text(b"\xff\xfe") + struct.pack("<IB", 0, 1) + bytes(50)),
    "dims": _header(1, 0, _text(b"t") + struct.pack("<I", 1 << 31) + bytes(64)),
    "overflow": _header(1, 0, _tensor(b"t", [1 << 62, 1 << 62], 0) + bytes(64)),
    "empty": _header(1, 0, _tensor(b"t", [0, 5], 0) + bytes(64)),
    "half a block": _header(1, 0, _tensor(b"t", [33], 8) + bytes(128)),
    "offset": _header(1, 0, _tensor(b"t", [4], 0, 1 << 63) + bytes(64)),
    "twice": _header(2, 0, _tensor(b"t", [1], 0) * 2 + bytes(64)),
    "alignment": _header(0, 1, _text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(64)),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(60)
def test_hostile_headers_are_refused_at_once(name, tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(ModelLoadError, match=r"hostile\.gguf"):
        GGUFFile(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_headers_give_a_file_or_a_load_error(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    rest = _text(b"k") + struct.pack("<IIQ3i", 9, 5, 3, 1, 2, 3) + _text(b"s") + struct.pack("<I", 8) + _text(b"text")
    whole = bytearray(_header(1, 2, rest + _tensor(b"t", [32], 8)) + bytes(96))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(4, len(whole) - 97))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    with contextlib.suppress(ModelLoadError):  # any other exception fails the test
        read = GGUFFile(path)
        assert all(t.offset + t.num_bytes <= len(whole) for t in read.tensors.values())
