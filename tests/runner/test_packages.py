"""What a package depends on, and what is refused: torn, foreign, unsigned."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.runner import packages
from headrace.runner.buckets import Bucket
from headrace.runner.packages import PackageRefused, compare, key_of, model_hash, package_facts, seal, service_facts, unseal
from headrace.runner.step_module import StepModule, StepShape
from tests.runner.tiny_packed import kernels_or_skip, load_tiny, write_tiny

FACTS = {"torch": "2.11.0", "instruction set": "avx2", "processor": "avx avx2", "bucket": "decode-1"}
BODY = b"library" * 100
SECRET = b"shared"


def refused(entry: bytes, facts: dict[str, str] = FACTS, secret: bytes | None = None) -> str:
    with pytest.raises(PackageRefused) as caught:
        unseal(entry, facts, secret)
    return str(caught.value)


def test_what_was_sealed_comes_back() -> None:
    assert unseal(seal(FACTS, BODY, None), FACTS, None) == BODY
    assert unseal(seal(FACTS, BODY, SECRET), FACTS, SECRET) == BODY
    assert unseal(seal(FACTS, BODY, SECRET), FACTS, None) == BODY


def test_torn_and_foreign_entries_are_refused_by_name() -> None:
    entry = seal(FACTS, BODY, None)
    assert refused(entry[:-1]) == f"it is torn: {len(BODY) - 1} of {len(BODY)} bytes"
    assert refused(entry + b"x") == f"it is torn: {len(BODY) + 1} of {len(BODY)} bytes"
    assert refused(entry[:-1] + b"X") == "its checksum is wrong"
    assert refused(b"") == "it is no package of ours"
    assert refused(b"PK\x03\x04") == "it is no package of ours"
    assert refused(entry[:40]) == "its header is torn"
    assert refused(entry, FACTS | {"torch": "2.13.0"}) == "its torch is 2.13.0 here and 2.11.0 there"
    assert refused(entry, FACTS | {"instruction set": "avx512vnni"}) == "its instruction set is avx512vnni here and avx2 there"
    assert refused(entry, FACTS | {"processor": "avx"}) == "its processor is of another generation"
    assert refused(entry, FACTS | {"model": "x"}) == "its model is x here and unknown there"


def test_only_signed_entries_are_loaded_where_there_is_a_secret() -> None:
    told = f"it is not signed with the secret of ${packages.SECRET_VARIABLE}"
    assert refused(seal(FACTS, BODY, None), secret=SECRET) == told
    assert refused(seal(FACTS, BODY, b"another"), secret=SECRET) == told
    forged = seal(FACTS, BODY, SECRET)
    head, _, tail = forged.partition(b'"sha256": "')
    hostile = BODY.replace(b"library", b"hostile")
    digest = hashlib.sha256(hostile).hexdigest()
    forged = head + b'"sha256": "' + digest.encode() + tail[64 : -len(BODY)] + hostile
    assert refused(forged, secret=SECRET) == told


@given(st.data())
def test_no_change_of_a_byte_gets_through(data: st.DataObject) -> None:
    entry = bytearray(seal(FACTS, b"body of a package", SECRET))
    place = data.draw(st.integers(0, len(entry) - 1))
    entry[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PackageRefused):
        unseal(bytes(entry), FACTS, SECRET)


@given(st.binary(max_size=300))
def test_no_bytes_are_taken_for_a_package(garbage: bytes) -> None:
    for entry in (garbage, b"headrace package\n" + garbage, b"headrace package\n\x02\x00\x00\x00{}" + garbage):
        with pytest.raises(PackageRefused):
            unseal(entry, FACTS, None)


def test_a_processor_may_have_more() -> None:
    compare(FACTS, FACTS | {"processor": "avx avx2 avx512f"})


def test_every_fact_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_or_skip()
    model, shape, bucket = (
        load_tiny(write_tiny(tmp_path / "a.gguf")),
        StepShape(static_length=32, block_size=4),
        Bucket(kind="decode", num_tokens=2, num_rows=2),
    )

    def key(*, shape=shape, bucket=bucket, kernels=kernels, flags=None, model=model) -> str:
        return key_of(package_facts(service_facts(StepModule(model, shape), shape, kernels, flags or {"a": 1}), bucket))

    first = key()
    assert key() == first
    others = {
        "length": key(shape=replace(shape, static_length=64)),
        "block size": key(shape=replace(shape, block_size=8)),
        "bucket": key(bucket=replace(bucket, num_tokens=4, num_rows=4)),
        "rows": key(bucket=replace(bucket, num_rows=1)),
        "instruction set": key(kernels=replace(kernels, isa="avx2" if kernels.isa != "avx2" else "generic")),
        "flags": key(flags={"a": 2}),
        "format": key(model=load_tiny(write_tiny(tmp_path / "b.gguf", quantization="Q4_0"))),
        "size": key(model=load_tiny(write_tiny(tmp_path / "c.gguf", intermediate_size=160))),
    }
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    others["torch"] = key()
    monkeypatch.undo()
    monkeypatch.setattr(packages, "source_hash", lambda: "changed")
    others["kernels"] = key()
    monkeypatch.undo()
    monkeypatch.setattr(packages, "vector_flags", lambda: ["avx"])
    others["processor"] = key()
    assert len({first, *others.values()}) == len(others) + 1


def test_a_model_is_known_by_its_shape_and_not_by_its_weights(tmp_path: Path) -> None:
    kernels_or_skip()
    shape = StepShape(static_length=32, block_size=4)
    path = write_tiny(tmp_path / "a.gguf")
    module = StepModule(load_tiny(path), shape)
    before = model_hash(module)
    module.model.embed_tokens.data.add_(1)
    assert model_hash(module) == before
    assert model_hash(StepModule(load_tiny(write_tiny(tmp_path / "b.gguf", num_hidden_layers=1)), shape)) != before
