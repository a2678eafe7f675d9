"""Files, batches and lines in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import StartError
from headrace.jobs.database import DATABASE, Database
from headrace.jobs.files import FileStore
from headrace.jobs.records import BatchRecord, Fault, Line, Result
from headrace.jobs.sqlite import SqliteStore, line_id

OK = Result(ok=True, text=b'{"ok": 1}')
BAD = Result(ok=False, text=b'{"ok": 0}')


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "batches")
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> SqliteStore:
    return SqliteStore(database)


def batch(name: str = "batch_a", *, tenant: str = "", **fields: object) -> BatchRecord:
    record = BatchRecord(
        batch_id=name,
        tenant=tenant,
        endpoint="/v1/completions",
        input_file_id="file-in",
        completion_window="24h",
        metadata={"who": "me"},
        status="validating",
        created_at=1000,
        expires_at=2000,
    )
    return replace(record, **fields)  # type: ignore[arg-type]


def begin(store: SqliteStore, name: str, count: int, *, tenant: str = "") -> None:
    store.add(batch(name, tenant=tenant))
    store.put(name, [Line(batch_id="", number=i, custom_id=f"c{i}", body=b"{}") for i in range(1, count + 1)])
    store.begin(name, count)


def names(lines: list[Line]) -> list[tuple[str, int]]:
    return [(line.batch_id, line.number) for line in lines]


def found(store: SqliteStore, name: str = "batch_a", tenant: str = "") -> BatchRecord:
    record = store.get(tenant, name)
    assert record is not None
    return record


def test_a_batch_is_kept_as_it_is_and_seen_by_its_tenant_only(store: SqliteStore):
    store.add(batch(tenant="me"))
    assert store.get("me", "batch_a") == batch(tenant="me")
    assert store.get("you", "batch_a") is None
    assert store.list("you", after=None, limit=9) == ([], False)


def test_lists_go_from_the_newest_and_have_pages(store: SqliteStore):
    for i in range(5):
        store.add(batch(f"batch_{i}"))
    store.add(batch("batch_x", tenant="you"))
    first, more = store.list("", after=None, limit=2)
    assert ([record.batch_id for record in first], more) == (["batch_4", "batch_3"], True)
    rest, more = store.list("", after="batch_3", limit=3)
    assert ([record.batch_id for record in rest], more) == (["batch_2", "batch_1", "batch_0"], False)
    assert store.list("", after="batch_x", limit=3) == ([], False)


def test_lines_are_taken_once_in_order_and_their_results_counted_once(store: SqliteStore):
    begin(store, "batch_a", 3)
    lines = store.take(2)
    assert names(lines) == [("batch_a", 1), ("batch_a", 2)]
    assert (lines[0].custom_id, lines[0].body, lines[0].endpoint) == ("c1", b"{}", "/v1/completions")
    assert names(store.take(5)) == [("batch_a", 3)]
    assert store.take(5) == []
    store.finish(lines[0], OK)
    store.finish(lines[0], BAD)  # the second result of a line changes nothing
    store.finish(lines[1], BAD)
    assert (found(store).status, found(store).completed, found(store).failed) == ("in_progress", 1, 1)
    store.finish(Line(batch_id="batch_a", number=3, custom_id="c3", body=b""), OK)
    assert (found(store).status, found(store).completed, found(store).failed) == ("finalizing", 2, 1)


def test_a_line_given_back_comes_again(store: SqliteStore):
    begin(store, "batch_a", 2)
    first, _ = store.take(2)
    store.finish(first, None)
    store.finish(first, OK)  # it is nobody's now
    (again,) = store.take(2)
    assert (again.number, again.attempts) == (1, 0)
    store.finish(again, None, engine_died=True)
    assert store.take(2)[0].attempts == 1
    assert found(store).completed == 0


def test_lines_of_a_batch_that_is_validated_or_cancelled_are_not_taken(store: SqliteStore):
    store.add(batch("batch_v"))
    store.put("batch_v", [Line(batch_id="", number=1, custom_id="c", body=b"{}")])
    begin(store, "batch_c", 2)
    store.cancel("batch_c")
    assert store.take(9) == []
    assert found(store, "batch_c").cancelling_at is not None


def test_tenants_take_turns_and_older_batches_go_first(store: SqliteStore):
    begin(store, "batch_a", 6, tenant="me")
    begin(store, "batch_b", 2, tenant="me")
    begin(store, "batch_c", 2, tenant="you")
    assert names(store.take(2)) == [("batch_a", 1), ("batch_c", 1)]
    assert names(store.take(1)) == [("batch_a", 2)]
    assert names(store.take(1)) == [("batch_c", 2)]
    assert names(store.take(4)) == [("batch_a", 3), ("batch_a", 4), ("batch_a", 5), ("batch_a", 6)]
    assert names(store.take(9)) == [("batch_b", 1), ("batch_b", 2)]


def test_what_a_killed_process_had_taken_can_be_taken_again(tmp_path: Path):
    database = Database(tmp_path)
    store = SqliteStore(database)
    begin(store, "batch_a", 3)
    first, _ = store.take(2)
    store.finish(first, OK)
    database.close()
    database = Database(tmp_path)
    store = SqliteStore(database)
    assert names(store.take(9)) == [("batch_a", 2), ("batch_a", 3)]
    assert found(store).completed == 1
    database.close()


def test_the_end_writes_both_files_in_order_and_may_be_done_twice(store: SqliteStore, database: Database):
    begin(store, "batch_a", 4)
    for line in reversed(store.take(4)):
        text = b'{"n": %d}' % line.number
        store.finish(line, Result(ok=line.number != 2, text=text))
    record = found(store)
    files = store.write_results(record, "completed")
    assert [file.file_id for file in store.write_results(record, "completed")] == [file.file_id for file in files]
    store.end(record, "completed", files)
    store.end(record, "completed", files)
    ended = found(store)
    assert (ended.status, ended.completed_at is not None) == ("completed", True)
    assert ended.output_file_id is not None
    assert ended.error_file_id is not None
    assert (database.files / ended.output_file_id).read_bytes() == b'{"n": 1}\n{"n": 3}\n{"n": 4}\n'
    assert (database.files / ended.error_file_id).read_bytes() == b'{"n": 2}\n'
    kept = FileStore(database).get("", ended.output_file_id)
    assert kept is not None
    assert (kept.size, kept.purpose, kept.filename) == (27, "batch_output", "batch_a_output.jsonl")
    assert database.connection.execute("SELECT COUNT(*) FROM lines").fetchone() == (0,)


@pytest.mark.parametrize(("status", "num_errors"), [("expired", 2), ("cancelled", 0)])
def test_an_early_end_keeps_what_was_answered(store: SqliteStore, database: Database, status: str, num_errors: int):
    begin(store, "batch_a", 3)
    first, *_ = store.take(2)
    store.finish(first, OK)
    store.stop("batch_a") if status == "expired" else store.cancel("batch_a")
    record = found(store)
    store.end(record, status, store.write_results(record, status))  # type: ignore[arg-type]
    ended = found(store)
    assert ended.status == status
    assert (database.files / str(ended.output_file_id)).read_bytes() == OK.text + b"\n"
    errors = [] if ended.error_file_id is None else (database.files / ended.error_file_id).read_text().splitlines()
    assert len(errors) == num_errors
    assert all("batch_expired" in error for error in errors)
    store.finish(first, BAD)  # too late for anything
    assert found(store).failed == 0


def test_a_failed_validation_keeps_its_faults(store: SqliteStore):
    store.add(batch())
    faults = (Fault(code="invalid_json_line", message="no", line=3), Fault(code="x", message="y", param="z"))
    store.fail("batch_a", faults)
    assert (found(store).status, found(store).errors) == ("failed", faults)


def test_files(database: Database):
    files = FileStore(database)
    for i in range(3):
        part = files.part()
        part.write_bytes(b"x" * (i + 1))
        files.add(part, tenant="me", purpose="batch", filename=f"{i}.jsonl")
    newest, _ = files.list("me", purpose=None, after=None, limit=9, order="desc")
    assert [record.size for record in newest] == [3, 2, 1]
    page, more = files.list("me", purpose="batch", after=newest[2].file_id, limit=1, order="asc")
    assert ([record.size for record in page], more) == ([2], True)
    assert files.list("me", purpose="batch_output", after=None, limit=9, order="asc") == ([], False)
    assert files.get("you", newest[0].file_id) is None
    assert (files.stored_bytes("me"), files.stored_bytes("you")) == (6, 0)
    files.delete(newest[0].file_id)
    assert files.get("me", newest[0].file_id) is None
    assert not files.path(newest[0].file_id).exists()


def test_one_process_holds_the_folder(tmp_path: Path):
    database = Database(tmp_path)
    with pytest.raises(StartError, match=r"in use by another server.*--batch-dir"):
        Database(tmp_path)
    database.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"cannot be used.*--batch-dir"):
        Database(tmp_path / "file")
    (tmp_path / DATABASE).write_bytes(b"no database" * 1000)
    with pytest.raises(StartError, match=r"batches\.sqlite cannot be used"):
        Database(tmp_path)


def test_a_transaction_is_whole_or_not_at_all(database: Database):
    line = Line(batch_id="", number=1, custom_id="c", body=b"{}")
    with pytest.raises(sqlite3.IntegrityError):
        SqliteStore(database).put("batch_a", [line, line])
    assert database.connection.execute("SELECT COUNT(*) FROM lines").fetchone() == (0,)


def test_ids_of_results():
    assert line_id("batch_abc", 7) == "batch_req_abc_7"
