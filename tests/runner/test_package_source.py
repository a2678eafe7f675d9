"""Cache, claim and compiler together, with a compiler that only counts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace.kernels.cpu.build import KernelBuildError
from headrace.runner import package_source
from headrace.runner.background import CompileFailed, Stopped
from headrace.runner.buckets import Bucket, decode_buckets
from headrace.runner.compile_cache import Claim, DirectoryStore, PackageStore, StoreError
from headrace.runner.package_source import PackageSource
from headrace.runner.packages import SECRET_VARIABLE, key_of, package_facts, seal
from tests.patience import LIMIT_S, until

FACTS = {"torch": "2.13.0", "instruction set": "avx512vnni", "model": "m"}
BUCKETS = decode_buckets(8)


@pytest.fixture(autouse=True)
def compiler_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_source, "find_compiler", lambda: "g++")


class CountingCompiler:
    def __init__(self, *, seconds: float = 0.0, failing: Sequence[str] = ()) -> None:
        self.compiled: list[str] = []
        self.go_on: dict[str, threading.Event] = {}  # what the compilation of a bucket waits for
        self._seconds, self._failing = seconds, failing

    def compile(self, bucket: Bucket, tick: Callable[[], None]) -> bytes:
        time.sleep(self._seconds)
        if bucket.name in self.go_on:
            assert self.go_on[bucket.name].wait(LIMIT_S)
        tick()
        self.compiled.append(bucket.name)
        if bucket.name in self._failing:
            raise CompileFailed("out of luck")
        return body_of(bucket)


def body_of(bucket: Bucket) -> bytes:
    return b"code of " + bucket.name.encode()


class Worker:
    """What a service makes of its source."""

    def __init__(self, store: PackageStore | None, *, facts: dict[str, str] = FACTS, seconds: float = 0.0, failing: Sequence[str] = ()) -> None:
        self.compiler = CountingCompiler(seconds=seconds, failing=failing)
        self.counted: list[Bucket] = []
        self.begun: list[str] = []
        self.found: dict[str, bytes] = {}
        self.failures: dict[str, str] = {}
        self.ended = threading.Event()
        self.source = PackageSource(facts, store, self.compiler, self._wait, self.counted.append)  # type: ignore[arg-type]

    def _wait(self, seconds: float) -> None:
        if self.ended.wait(min(seconds, 0.01)):
            raise Stopped

    def run(self, buckets: Sequence[Bucket] = BUCKETS) -> Worker:
        self.source.obtain(
            buckets,
            begin=lambda bucket: self.begun.append(bucket.name),
            found=lambda bucket, body: self.found.__setitem__(bucket.name, body),
            failed=lambda bucket, reason: self.failures.__setitem__(bucket.name, reason),
        )
        return self


ALL = {bucket.name: body_of(bucket) for bucket in BUCKETS}


def test_without_a_store_everything_is_compiled_in_order() -> None:
    worker = Worker(None).run()
    assert worker.compiler.compiled == [bucket.name for bucket in worker.counted] == list(ALL)
    assert worker.found == ALL


def test_what_is_in_the_cache_is_not_compiled(tmp_path: Path) -> None:
    first = Worker(DirectoryStore(tmp_path)).run(BUCKETS[:2])
    second = Worker(DirectoryStore(tmp_path)).run()
    assert first.compiler.compiled == ["decode-1", "decode-2"]
    assert second.compiler.compiled == ["decode-4", "decode-8"]
    assert second.found == ALL
    third = Worker(DirectoryStore(tmp_path)).run()
    assert (third.compiler.compiled, third.begun, third.found) == ([], [], ALL)


def test_of_two_workers_that_start_together_one_compiles(tmp_path: Path) -> None:
    workers = [Worker(DirectoryStore(tmp_path), seconds=0.05) for _ in range(2)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(worker.found == ALL for worker in workers)
    assert sorted(len(worker.compiler.compiled) for worker in workers) == [0, len(BUCKETS)]


def test_a_waiting_worker_goes_on_where_the_other_has_died(tmp_path: Path) -> None:
    dying, waiting = Worker(DirectoryStore(tmp_path)), Worker(DirectoryStore(tmp_path))
    dying.compiler.go_on["decode-2"] = threading.Event()

    def run_to_the_end() -> None:
        with pytest.raises(Stopped):
            dying.run()

    thread = threading.Thread(target=run_to_the_end)
    thread.start()
    until(lambda: "decode-2" in dying.begun)
    other = threading.Thread(target=waiting.run)
    other.start()
    until(lambda: waiting.begun)
    dying.ended.set()
    dying.compiler.go_on["decode-2"].set()
    thread.join()
    other.join(LIMIT_S)
    assert waiting.found == ALL
    assert dying.compiler.compiled == ["decode-1"]
    assert waiting.compiler.compiled == ["decode-2", "decode-4", "decode-8"]


@pytest.mark.parametrize("damage", [b"", b"torn", None], ids=["empty", "torn", "altered"])
def test_a_damaged_entry_is_refused_and_rebuilt(tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    store = DirectoryStore(tmp_path)
    Worker(store).run()
    key = key_of(package_facts(FACTS, BUCKETS[1]))
    entry = store.get(key)
    assert entry is not None
    store.put(key, entry[:-4] + b"evil" if damage is None else damage)
    worker = Worker(store).run()
    assert worker.compiler.compiled == ["decode-2"]
    assert worker.found == ALL
    assert caplog.text.count("the entry of decode-2 is refused") == 1
    assert Worker(store).run().compiler.compiled == [], "the rebuilt one replaced it"


def test_a_cache_of_another_instruction_set_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DirectoryStore(tmp_path)
    other = FACTS | {"instruction set": "avx2"}
    Worker(store, facts=other).run()
    assert Worker(store).run().compiler.compiled == list(ALL)
    # not even where somebody put it in our place
    facts = package_facts(other, BUCKETS[0])
    store.put(key_of(package_facts(FACTS, BUCKETS[0])), seal(facts, b"foreign", None))
    worker = Worker(store).run()
    assert worker.found == ALL
    assert "its instruction set is avx512vnni here and avx2 there" in caplog.text


def test_with_a_secret_unsigned_entries_are_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    Worker(store).run()
    monkeypatch.setenv(SECRET_VARIABLE, "shared")
    assert Worker(store).run().compiler.compiled == list(ALL)
    assert Worker(store).run().compiler.compiled == []
    monkeypatch.setenv(SECRET_VARIABLE, "another")
    assert Worker(store).run().compiler.compiled == list(ALL)


def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    worker = Worker(DirectoryStore(tmp_path), failing=["decode-2"]).run()
    assert worker.failures == {"decode-2": "out of luck"}
    assert list(worker.found) == ["decode-1", "decode-4", "decode-8"]


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> str:
        raise KernelBuildError("there is no C++ compiler on the PATH")

    Worker(DirectoryStore(tmp_path)).run(BUCKETS[:1])
    monkeypatch.setattr(package_source, "find_compiler", nothing)
    worker = Worker(DirectoryStore(tmp_path)).run()
    assert list(worker.found) == ["decode-1"], "what is there serves"
    assert set(worker.failures.values()) == {"there is no C++ compiler on the PATH"}
    assert worker.compiler.compiled == []


class BrokenStore:
    """Breaks at the given call, as a server that goes away."""

    where, is_shared = "broken://", True

    def __init__(self, at: str) -> None:
        self._at = at

    def _reach(self, call: str) -> None:
        if call == self._at:
            raise StoreError("broken:// is gone")

    def get(self, key: str) -> bytes | None:
        self._reach("get")
        return None

    def put(self, key: str, entry: bytes) -> None:
        self._reach("put")

    def claim(self, key: str) -> Claim | None:
        self._reach("claim")
        return self

    def renew(self) -> None:
        self._reach("renew")

    def release(self) -> None:
        self._reach("release")


@pytest.mark.parametrize("call", ["get", "put", "claim", "release"])
def test_a_store_that_goes_away_costs_only_the_cache(call: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(BrokenStore(call)).run()
    assert worker.found == ALL
    assert worker.compiler.compiled == list(ALL)
    assert caplog.text.count("broken:// is gone; going on without it") == 1
    assert "whoever can write there can run code here" in caplog.text


def test_a_shared_store_with_a_secret_needs_no_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "shared")
    with caplog.at_level(logging.WARNING):
        Worker(BrokenStore("never"))
    assert not caplog.records
