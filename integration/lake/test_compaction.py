"""Small files of a lake's tables are written together behind a batch: rows, versions and batches stay what they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from driving import run
from lake import Begin, Lake, rows_of
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.lake import compaction
from pg_cdc_source.lake.targets import LEDGER


class _Killed(BaseException):
    """Ends a batch as a killed process does."""


@pytest.mark.parametrize(
    ("tables", "deletes"),
    [({"t": "merge"}, "hard"), ({"t": "merge", "l": "append", "h": "history"}, "soft")],
    ids=["merge", "others"],
)
def test_small_files_are_written_together(
    tables: Mapping[str, str], deletes: str, format: str, pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(tables) > 1 and format != "deltalake":
        pytest.skip("to Spark's own commands files are the same in every mode")
    lake = begin(*(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in tables),
                 mode={f"public.{name}": mode for name, mode in tables.items()}, deletes=deletes)  # fmt: skip
    monkeypatch.setattr(compaction, "COMMITS", 1)
    lake.begin_as(lake.shapes, compacts=False)
    # Iceberg writes no fewer than five files together; delta-rs writes a file anew that a merge touches.
    for number in range(1 if format == "delta" else 3):
        change(pg, lake, tables, f"INSERT INTO {{}} VALUES ({number}, 'a'), ({number + 100}, 'b')")
    before = lake.ledger.last()
    assert before is not None
    rows = {name: lake.rows(name) for name in tables}
    assert not any(lake.compactions(name) for name in tables)

    lake.begin_as(lake.shapes)
    whole = lake.kind.compact

    def killed_before(self: Any) -> None:
        raise _Killed

    def killed_behind(self: Any) -> None:
        whole(self)
        raise _Killed

    monkeypatch.setattr(lake.kind, "compact", killed_before)
    change(pg, lake, tables, "INSERT INTO {} VALUES (3, 'a')", "DELETE FROM {} WHERE id = 100")
    # What has ended the process once is not done again with the same batch.
    assert not any(lake.compactions(name) for name in tables)
    files = {name: lake.files(name) for name in tables}
    monkeypatch.setattr(lake.kind, "compact", killed_behind)
    change(pg, lake, tables, "INSERT INTO {} VALUES (4, 'a')", "UPDATE {} SET v = 'c' WHERE id = 0")
    last = lake.ledger.last()
    assert last is not None
    for name in tables:
        assert lake.compactions(name) == {last.batch_id}
        assert lake.files(name) < files[name]
        # The ledger names the version that has the new files.
        assert lake.files(name, last.tables[f"public.{name}"]) == lake.files(name)
        assert lake.rows(name, last.tables[f"public.{name}"]) == rows_of(pg, name)
        assert lake.rows(name, before.tables[f"public.{name}"]) == rows[name]
        merges = lake.merged_batches(name)
        assert len(merges) == len(set(merges))
    batches = [row["batch_id"] for row in lake.ledger_rows()]
    assert batches == [*range(last.batch_id + 1)]
    assert lake.files(LEDGER) < len(batches)


def test_a_thread_without_a_session_writes_files_together(
    format: str, pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those are in which a mirror brings tables side by side."""
    if format != "iceberg":
        pytest.skip("only Iceberg's actions look for one")
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, v text)")
    lake.begin_as(lake.shapes, compacts=False)
    for number in range(5):
        change(pg, lake, ["t"], f"INSERT INTO {{}} VALUES ({number}, 'a')")
    whole, failures = lake.kind.compact, []

    def in_a_thread(self: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            failures.append(pool.submit(whole, self).exception())

    monkeypatch.setattr(compaction, "COMMITS", 1)
    monkeypatch.setattr(lake.kind, "compact", in_a_thread)
    lake.begin_as(lake.shapes)
    files = lake.files("t")
    change(pg, lake, ["t"], "INSERT INTO {} VALUES (9, 'a')")
    assert failures == [None]
    assert lake.files("t") < files


def test_what_somebody_else_commits_right_before_a_compaction_is_noticed(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')")
    monkeypatch.setattr(compaction, "COMMITS", 1)
    before, whole = lake.ledger.last(), lake.kind.compact
    assert before is not None

    def raced(self: Any) -> None:
        lake.write_as_somebody_else("t")
        whole(self)

    monkeypatch.setattr(lake.kind, "compact", raced)
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    wait_until(lambda: (row := lake.step()) is not None and row.tables != before.tables)
    assert "somebody else" not in str(lake.ledger.last())
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    wait_until(lambda: lake.step() is not None and "changed by somebody else: version" in str(lake.ledger.last()))


def change(pg: Session, lake: Lake, tables: Iterable[str], *statements: str) -> None:
    """Change all tables in one commit, and run its batch until it is done."""
    changes = (statement.format(name) for name in tables for statement in statements)
    run(pg, f"BEGIN; {'; '.join(changes)}; COMMIT")

    def is_done() -> bool:
        try:
            lake.step()
        except _Killed:
            lake.restart()
            return False
        return all(lake.rows(name) == rows_of(pg, name) for name in tables)

    wait_until(is_done)
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


@pytest.mark.parametrize("format", ["deltalake"])
def test_timestamps_in_files_that_spark_has_written_together_are_kept(pg: Session, begin: Begin) -> None:
    """Spark's OPTIMIZE writes INT96 by default, whose nanoseconds reach from 1677 to 2262."""
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, at timestamptz)")
    first, last = datetime(1200, 1, 1, tzinfo=timezone.utc), datetime(9999, 1, 1, tzinfo=timezone.utc)
    run(pg, f"INSERT INTO t VALUES (1, '{first}'), (2, '{last}')")
    wait_until(lambda: lake.step() and lake.found("t"))
    _write_as_int96(Path(lake.targets["public.t"]))
    run(pg, "ALTER TABLE t ADD COLUMN n int DEFAULT 7", "UPDATE t SET id = 3 WHERE id = 2")
    wanted = {(1, first, 7), (3, last, 7)}
    wait_until(lambda: lake.step() and {tuple(row.values()) for row in lake.found("t")} == wanted)


def _write_as_int96(path: Path) -> None:
    """Write a table's file again in its place, as Spark does, and have its log say so."""
    (file,) = path.glob("*.parquet")
    pq.write_table(pq.read_table(file), file, use_deprecated_int96_timestamps=True)
    (log,) = (log for log in path.glob("_delta_log/*.json") if file.name in log.read_text())
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            action["add"]["size"] = file.stat().st_size
    log.write_text("\n".join(map(json.dumps, actions)))
