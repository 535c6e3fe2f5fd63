"""Tables that are altered, and of which no row comes: a stream with onSchemaChange=emit says it all the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
from driving import SLOT, Drive, Driver, Row, run
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream.look_pace import LookPace

TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, a int)",
    "INSERT INTO t VALUES (1, 1), (2, 2)",
    "CREATE TABLE u (id int)",
)


def standing(drive: Drive, pg: Session, **options: str) -> Driver:
    """A stream that has the rows of t and u."""
    run(pg, *TABLES, "ALTER TABLE u REPLICA IDENTITY FULL", f"CREATE PUBLICATION {SLOT} FOR TABLE t, u")
    driver = drive(tables="public.*", onSchemaChange="emit", onNewTable="snapshot", **options)
    wait_until(lambda: not driver.batch() and driver.offset.done == len(driver.offset.tables))
    driver.rows.clear()
    return driver


def said(rows: list[Row], table: str = "public.t") -> list[tuple[str, str | None, str | None]]:
    """What the rows say of changes: change, column, and what old rows have in it."""
    return [
        (change["change"], change["name"], change.get("fill"))
        for row in rows
        if (row["_table"], row["_change_type"]) == (table, "schema")
        for change in json.loads(row["after"])["changes"]
    ]


def read_until(driver: Driver, is_there: Callable[[], bool]) -> list[Row]:
    wait_until(lambda: driver.batch() is not None and is_there())
    return driver.rows


def go_to_end_of_wal(driver: Driver, pg: Session) -> None:
    [(end,)] = run(pg, "SELECT pg_current_wal_flush_lsn()::text")
    read_until(driver, lambda: driver.offset.position.next_lsn >= Lsn.parse(end))


@pytest.mark.parametrize("is_down", [False, True], ids=["running", "down"])
@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        ("ADD b text DEFAULT 'x'", [("added", "b", "x")]),
        ("DROP a", [("dropped", "a", None)]),
        ("RENAME a TO c", [("renamed", "c", None)]),
        ("RENAME TO v", [("renamed", "public.v", None)]),
        ("REPLICA IDENTITY FULL", [("rekeyed", "id", None)]),
    ],
)
def test_what_was_altered_is_said_without_a_row(
    drive: Drive, pg: Session, is_down: bool, alter: str, expected: list[tuple[str, str, str]]
) -> None:
    driver = standing(drive, pg)
    if is_down:
        driver.stop()
    run(pg, f"ALTER TABLE t {alter}")
    if is_down:
        driver.start()
    name = "public.v" if "TO v" in alter else "public.t"
    rows = read_until(driver, lambda: bool(said(driver.rows, name)))
    assert said(rows, name) == expected
    [row] = rows
    assert row["_commit_lsn"] <= driver.offset.position.lsn
    assert driver.again() == [row]
    # The next row has nothing more to say, also in another process.
    driver.restart()
    run(pg, f"INSERT INTO {name} VALUES (3)")
    rows = read_until(driver, lambda: len(driver.rows) > 1)
    assert [row["_change_type"] for row in rows] == ["schema", "insert"]


def test_rows_that_were_rewritten_come_again(drive: Drive, pg: Session) -> None:
    driver = standing(drive, pg)
    run(pg, "ALTER TABLE t ALTER a TYPE bigint USING a * 10")
    rows = read_until(driver, lambda: len([row for row in driver.rows if row["_change_type"] == "snapshot"]) == 2)
    assert said(rows)[:2] == [("retyped", "a", None), ("rewritten", None, None)]
    come = rows[[row["_change_type"] for row in rows].index("truncate") :]
    assert sorted(row["after"] for row in come if row["_change_type"] == "snapshot") == [
        '{"id":1,"a":10}',
        '{"id":2,"a":20}',
    ]


def test_it_is_said_where_the_wal_stands_still(drive: Drive, pg: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is at the end of the WAL, behind the DDL, when a look finds it: the batch ends where it starts."""
    driver = standing(drive, pg)
    looks = threading.Event()
    monkeypatch.setattr(LookPace, "is_due", lambda self: looks.is_set())
    stood_still, expected = 0, []
    for column in range(5):
        looks.clear()
        run(pg, f"ALTER TABLE t ADD c{column} int DEFAULT {column}")
        expected.append(("added", f"c{column}", str(column)))
        go_to_end_of_wal(driver, pg)
        before = driver.offset.position
        looks.set()
        rows = read_until(driver, lambda: said(driver.rows) == expected)
        if driver.offset.position == before:
            stood_still += 1
            assert driver.again() == rows[-1:]
    # The server may have written something by itself.
    assert stood_still > 0
    looks.clear()
    run(pg, "ALTER TABLE t ALTER a TYPE bigint USING a * 10")
    go_to_end_of_wal(driver, pg)
    looks.set()
    rows = read_until(driver, lambda: len([row for row in driver.rows if row["_change_type"] == "snapshot"]) == 2)
    assert {json.loads(row["after"])["a"] for row in rows if row["_change_type"] == "snapshot"} == {10, 20}


def test_a_busy_stream_says_it_as_well(drive: Drive, pg: Session) -> None:
    driver = standing(drive, pg)
    run(pg, "ALTER TABLE t ADD b int DEFAULT 5")

    def is_said() -> bool:
        run(pg, "INSERT INTO u VALUES (1)")
        return bool(said(driver.rows))

    rows = read_until(driver, is_said)
    assert said(rows) == [("added", "b", "5")]
    # It stands behind all that was committed before it, and before all that is behind it.
    order = [(row["_commit_lsn"], row["_seq"]) for row in rows]
    assert order == sorted(order)


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark does not tell a Python source that it is to end")
def test_who_takes_what_is_there_now_has_it_altered(drive: Drive, pg: Session) -> None:
    driver = standing(drive, pg)
    driver.stop()
    run(pg, "ALTER TABLE t ADD b int DEFAULT 5")
    driver.start_available_now()
    while driver.attempt(read=False) is not None:
        driver.batch()
    assert said(driver.rows) == [("added", "b", "5")]


def test_of_rows_that_come_after_all_it_is_said_once(drive: Drive, pg: Session) -> None:
    driver = standing(drive, pg)
    for column in range(20):
        run(pg, f"ALTER TABLE t ADD c{column} int DEFAULT {column}")
        if column % 3 == 0:
            driver.batch()
        run(pg, f"INSERT INTO t (id) VALUES ({100 + column})")
    rows = read_until(driver, lambda: sum(row["_change_type"] == "insert" for row in driver.rows) == 20)
    assert said(rows) == [("added", f"c{column}", str(column)) for column in range(20)]


TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE DOMAIN felt AS mood",
    "CREATE TYPE feeling AS (mood felt, since int)",
    "CREATE TABLE inside (a int)",
    "CREATE TABLE m (mood mood PRIMARY KEY, moods felt[], feeling feeling, of_table inside[])",
    "INSERT INTO m VALUES ('sad', '{ok}', ('ok', 1), '{(1)}'), ('ok', '{sad}', ('sad', 2), '{(2)}')",
)


@pytest.mark.parametrize(
    ("column", "alter"),
    [
        *((column, "TYPE mood RENAME VALUE 'ok' TO 'fine'") for column in ("mood", "moods", "feeling")),
        ("feeling", "TYPE feeling ADD ATTRIBUTE why text"),
        ("feeling", "TYPE feeling DROP ATTRIBUTE since"),
        ("of_table", "TABLE inside ADD b int"),
    ],
)
def test_values_whose_texts_are_others_come_again(drive: Drive, pg: Session, column: str, alter: str) -> None:
    """PostgreSQL sends nothing of it. Later changes would not find a row by its old key."""
    run(pg, *TYPES, *(f"ALTER TABLE m DROP {other}" for other in {"moods", "feeling", "of_table"} - {column}))
    run(pg, f"CREATE PUBLICATION {SLOT} FOR TABLE m")
    driver = drive(tables="public.m", onSchemaChange="emit", onNewTable="snapshot")
    wait_until(lambda: not driver.batch() and driver.offset.done == len(driver.offset.tables))
    driver.rows.clear()
    run(pg, "ALTER TYPE mood ADD VALUE 'glad'", "ALTER TYPE mood ADD VALUE 'so-so' BEFORE 'ok'")
    run(pg, "INSERT INTO m (mood) VALUES ('glad')")
    rows = read_until(driver, lambda: len(driver.rows) > 0)
    assert [row["_change_type"] for row in rows] == ["insert"]
    driver.restart()
    rows.clear()
    run(pg, f"ALTER {alter}")
    rows = read_until(driver, lambda: len([row for row in driver.rows if row["_change_type"] == "snapshot"]) == 3)
    assert said(rows, "public.m")[0] == ("rewritten", None, None)
    come = {json.loads(row["after"])[column] for row in rows if row["_change_type"] == "snapshot"}
    assert come == {text for (text,) in run(pg, f"SELECT {column}::text FROM m")}
