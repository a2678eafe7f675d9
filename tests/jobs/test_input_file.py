from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from headrace.jobs import input_file
from headrace.jobs.input_file import InputFile

ENDPOINT = "/v1/completions"


def request(custom_id: object = "a", **fields: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "é"}} | fields, ensure_ascii=False)


def read(path: Path, content: str | bytes) -> tuple[InputFile, list]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    file = InputFile(path, endpoint=ENDPOINT, max_line_bytes=1000)
    return file, [line for chunk in file.chunks() for line in chunk]


def test_lines_are_numbered_as_in_the_file_and_blank_ones_passed_over(tmp_path: Path):
    file, lines = read(tmp_path / "in", f"{request('a')}\n\n  \n{request('b')}\r\n{request('c')}")
    assert [(line.number, line.custom_id) for line in lines] == [(1, "a"), (4, "b"), (5, "c")]
    assert (file.faults, file.num_lines) == ([], 3)
    assert lines[0].body == '{"prompt": "é"}'.encode()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{not json", "invalid_json_line"),
        ("7", "invalid_request"),
        ("[]", "invalid_request"),
        ("{}", "invalid_request"),
        (request(5), "invalid_request"),
        (request("b", more=1), "invalid_request"),
        (request(""), "invalid_custom_id"),
        (request("x" * 600), "invalid_custom_id"),
        (request("a"), "duplicate_custom_id"),
        (request("b", method="GET"), "invalid_method"),
        (request("b", url="/v1/embeddings"), "mismatched_url"),
        (request("b", body=[1]), "invalid_body"),
        (request("b", body={"prompt": "x" * 2000}), "line_too_long"),
        ("[" * 900, "invalid_request"),
        (b"\xff\xfe".decode("latin-1"), "invalid_json_line"),
    ],
)
def test_faults_name_their_line(tmp_path: Path, line: str, code: str):
    file, lines = read(tmp_path / "in", f"{request('a')}\n{line}\n{request('z')}\n".encode("latin-1", "replace"))
    assert [(fault.line, fault.code) for fault in file.faults] == [(2, code)]
    assert file.faults[0].message
    assert lines == []


def test_an_empty_file_is_a_fault(tmp_path: Path):
    for content in ("", "\n\n"):
        file, lines = read(tmp_path / "in", content)
        assert ([fault.code for fault in file.faults], lines) == (["empty_file"], [])


def test_faults_and_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, _ = read(tmp_path / "in", "7\n" * 500)
    assert len(file.faults) == input_file.MAX_FAULTS
    monkeypatch.setattr(input_file, "MAX_LINES", 2)
    file, _ = read(tmp_path / "in", "\n".join(request(str(i)) for i in range(3)))
    assert [fault.code for fault in file.faults] == ["too_many_requests"]


def test_a_large_file_takes_little_memory(tmp_path: Path):
    path = tmp_path / "in"
    path.write_text("".join(request(f"{i}", body={"prompt": "x" * 1000}) + "\n" for i in range(20_000)))
    file = InputFile(path, endpoint=ENDPOINT, max_line_bytes=10_000)
    tracemalloc.start()
    try:
        count = sum(len(chunk) for chunk in file.chunks())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (count, file.num_lines, file.faults) == (20_000, 20_000, [])
    assert peak < 6_000_000 < path.stat().st_size
