"""Sessions over a restart: with a real engine process, and file by file with everything that can be wrong with one."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.core.kv_manager import KVManager
from headrace.engine.session_file import read_header
from headrace.engine.session_store import SessionStore
from headrace.errors import ConfigError
from headrace.runner.fake import FakeRunner, FakeScript
from tests.engine.fake_engine import add, collect, engine, fake_config

SIZE = 4


class Run:
    """One life of an engine: its tables, its runner and its store. `wall` is the time outside."""

    def __init__(self, directory: Path, *, wall: float = 0.0, quota: int = 10**9, num_blocks: int = 32, block_size: int = SIZE) -> None:
        self.runner = FakeRunner(EngineConfig(model="", block_size=block_size, num_gpu_blocks_override=num_blocks), FakeScript())
        self.kv = KVManager(num_blocks=num_blocks, block_size=block_size, session_lease_s=100.0)
        self.now = 5.0
        self.store = SessionStore(str(directory), quota=quota, kv=self.kv, runner=self.runner, clock=lambda: self.now, wall=lambda: wall + self.now)

    def turn(self, name: str, tokens: list[int], *, tenant: str = "", salt: str | None = None) -> int:
        """A turn of a session; block content stands for the tokens up to its end. Returns the tokens found."""
        self.now += 1.0
        self.kv.begin_plan(self.now)
        table = self.kv.new_table(session_id=name, tenant=tenant, salt=salt)
        taken = self.kv.take(table, tokens, read_cache=True, reserve=0)
        assert taken is not None
        for index, block in enumerate(table.blocks):
            content = b"".join(hash((salt, *tokens[: index * SIZE + i + 1])).to_bytes(8, "little", signed=True) for i in range(SIZE))
            if index < taken[0] // SIZE:
                assert self.runner.read_block(block) == content, "a block that was found holds something else"
            else:
                self.runner.write_block(block, content)
        self.kv.register(table, tokens, len(tokens))
        self.kv.end_plan()
        self.kv.free(table)
        self.kv.check([])
        return taken[0]


A, B = list(range(100, 110)), list(range(200, 217))


async def test_a_session_goes_on_after_a_restart(tmp_path):
    config = fake_config(session_dir=str(tmp_path / "sessions"), block_size=4)
    answers = []
    for _ in range(3):
        async with engine(config) as client:
            answers.append(await collect(client, replace(add(tuple(range(50)), max_tokens=6), session_id="talk")))
    assert [answer.cached_tokens for answer in answers] == [0, 48, 48]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    (file,) = (tmp_path / "sessions").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_header(file).token_ids[:50] == tuple(range(50))


async def test_requests_that_are_cut_off_leave_sound_files(tmp_path):
    """The end comes while a step runs and another one is planned: what that one would have written is not kept."""
    config = fake_config({"step_seconds": 0.02}, session_dir=str(tmp_path), block_size=2, max_num_batched_tokens=64)
    async with engine(config) as client:
        stream = client.submit(replace(add(tuple(range(60)), max_tokens=300), session_id="talk"))
        for _ in range(4):
            await anext(stream)
        await client.close()
    async with engine(config) as client:
        answer = await collect(client, add(tuple(range(60)), max_tokens=20))
        assert len(answer.token_ids) == 20, "the fake runner compares what it attends to"


async def test_a_directory_that_cannot_be_used_is_said_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--session-dir"):
        async with engine(fake_config(session_dir=str(tmp_path / "file"))):
            pass
    with pytest.raises(ConfigError, match="--session-dir"):
        fake_config(session_dir=str(tmp_path), enable_prefix_caching=False)


def test_sessions_keep_their_salt_and_tenant_and_share_what_they_share(tmp_path):
    first = Run(tmp_path)
    first.turn("s", A, tenant="t")
    first.turn("s", A, tenant="u", salt="x")
    first.turn("other", [*A[:8], 1, 2, 3, 4])
    assert first.store.save() == 3
    second = Run(tmp_path)
    assert second.store.load() == 3
    second.kv.check([])
    assert second.kv.pool.num_findable == 2 + 2 + 1
    assert second.turn("new", A, salt="x") == 8
    assert second.turn("new", [*A[:8], 1, 2, 3, 4, 5]) == 12
    assert second.turn("new", A, salt="y") == 0
    assert {(item.session_id, item.tenant) for item in second.kv.sessions.live(0.0)} >= {("s", "t"), ("s", "u"), ("other", "")}


def test_the_latest_come_back_first_where_there_is_little_room(tmp_path):
    first = Run(tmp_path)
    first.turn("old", A)
    first.turn("late", B)
    first.store.save()
    second = Run(tmp_path, num_blocks=5)
    assert second.store.load() == 2
    second.kv.check([])
    assert (second.kv.pool.num_blank, second.kv.pool.num_findable) == (0, 5)
    assert second.turn("late", B) == 16
    assert Run(tmp_path, num_blocks=4).store.load() == 1


def test_the_quota_keeps_the_latest(tmp_path):
    first = Run(tmp_path, quota=600)
    first.turn("old", B)
    first.turn("late", B[:9])
    assert first.store.save() == 1
    assert [read_header(path).session_id for path in tmp_path.iterdir()] == ["late"]


def test_files_of_sessions_that_have_gone_are_removed(tmp_path):
    first = Run(tmp_path)
    first.turn("a", A)
    first.store.save()
    (tmp_path / "left.partial").write_bytes(b"half")
    other = Run(tmp_path, block_size=8)
    other.store.save()
    assert [path.suffix for path in tmp_path.iterdir()] == [".session"], "a file of another model stays"
    second = Run(tmp_path)
    second.turn("b", B)
    second.store.save()
    assert [read_header(path).session_id for path in tmp_path.iterdir()] == ["b"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(place: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "torn"),
        (flip(-1), "block 3 is damaged"),
        (flip(-20), "block 3 is damaged"),
        (flip(30), "header is damaged"),
        (flip(11), "header is damaged"),
        (flip(7), "another format or version"),
        (lambda path: path.write_bytes(b""), "another format or version"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
)
def test_a_damaged_file_is_named_and_left_out(tmp_path, caplog, damage, reason):
    first = Run(tmp_path)
    first.turn("bad", B)
    first.store.save()
    (bad,) = tmp_path.iterdir()
    first.turn("good", A)
    first.store.save()
    damage(bad)
    second = Run(tmp_path)
    with caplog.at_level(logging.WARNING, "headrace.sessions"):
        assert second.store.load() == 1
    (record,) = caplog.records
    assert str(bad) in record.message
    assert reason in record.message
    second.kv.check([])
    assert second.turn("bad", B) == 0
    assert second.turn("good", A) == 8


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda path: Run(path, block_size=8), "another block size: 4, not 8"),
        (lambda path: Run(path, wall=200.0), "lease has ended"),
    ],
)
def test_foreign_and_stale_files_are_named_and_left_out(tmp_path, caplog, run, reason):
    first = Run(tmp_path)
    first.turn("s", A)
    first.store.save()
    second = run(tmp_path)
    with caplog.at_level(logging.WARNING, "headrace.sessions"):
        assert second.store.load() == 0
    assert reason in caplog.text
    second.kv.check([])
    assert second.kv.pool.num_findable == 0


def test_a_disk_that_fails_leaves_no_half_file(tmp_path, caplog, monkeypatch):
    run = Run(tmp_path)
    run.turn("s", A)

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert run.store.save() == 0
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []
