"""Tables that are altered, and of which no row comes: a stream with onSchemaChange=emit says it all the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence

import pytest
from driving import SLOT, Drive, Driver, Row, run
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.offsets import Lsn, Member, Position
from pg_cdc_source.protocol.decoding_messages import Asked, write_request
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream.joining import Joining
from pg_cdc_source.stream.layouts.altered_tables import AlteredTables
from pg_cdc_source.stream.received.slot_reader import SlotReader
from pg_cdc_source.stream.tables.look_pace import LookPace

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


def wait_for_a_look(driver: Driver) -> None:
    """Until what is committed by now was looked at."""
    looks: list[bool] = []
    with pytest.MonkeyPatch.context() as patched:
        look = AlteredTables.look

        def counted(self: AlteredTables, tables: Sequence[Member]) -> None:
            looks.append(self.position is None)
            look(self, tables)

        patched.setattr(AlteredTables, "look", counted)
        # What the first finds is said by the time of another.
        read_until(driver, lambda: sum(looks) > 1)


def ask_for(pg: Session, table: str) -> None:
    run(pg, f"SELECT pg_logical_emit_message(true, 'pgcdc', '{write_request(Asked((table,)))}')")


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


RENAMED = {
    "renamed": ("ALTER TABLE t RENAME TO v",),
    "swapped": (
        "CREATE TABLE other (LIKE t INCLUDING ALL)",
        f"ALTER PUBLICATION {SLOT} ADD TABLE other",
        "ALTER TABLE t RENAME TO v",
        "ALTER TABLE other RENAME TO t",
    ),
}


@pytest.mark.parametrize("how", RENAMED)
def test_rows_that_were_rewritten_come_again_under_the_name_of_now(how: str, drive: Drive, pg: Session) -> None:
    """The batch that says it comes behind one that has the new name already."""
    driver = standing(drive, pg, maxRowsPerBatch="5")
    driver.stop()
    run(pg, *(f"INSERT INTO u VALUES ({i})" for i in range(20)), "ALTER TABLE t ALTER a TYPE int USING a * 100",
        "INSERT INTO t VALUES (9, 9)", *RENAMED[how])  # fmt: skip
    driver.start()

    def come_again() -> list[str]:
        driver.batch()
        rows = [row for row in driver.rows if (row["_table"], row["_change_type"]) == ("public.v", "snapshot")]
        return sorted(row["after"] for row in rows)

    assert wait_until(come_again) == ['{"id":1,"a":100}', '{"id":2,"a":200}', '{"id":9,"a":9}']


def test_what_was_altered_is_said_before_the_next_row_also_beside_a_table_that_was_rewritten(
    drive: Drive, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[SlotReader] = []
    read_through = SlotReader.read_through

    def noted(self: SlotReader, end: Position, require_driver: Callable[[], None]) -> None:
        readers.append(self)
        read_through(self, end, require_driver)

    monkeypatch.setattr(SlotReader, "read_through", noted)
    driver = standing(drive, pg)
    driver.stop()
    run(pg, "UPDATE t SET a = 5", "ALTER TABLE u ADD b int DEFAULT 5", "ALTER TABLE t ALTER a TYPE bigint USING a * 10")
    driver.start()
    read_until(driver, lambda: bool(driver.rows))
    assert {row["_change_type"] for row in driver.rows} == {"update"} or not HAS_LIMITS
    run(pg, "INSERT INTO u VALUES (1)")
    if HAS_LIMITS:
        # So that the next batch has it, if nothing keeps it out.
        wait_until(lambda: readers[-1].waiting(driver.offset.position).rows > 0)
    rows = read_until(driver, lambda: any(row["_change_type"] == "insert" for row in driver.rows))
    assert [row["_change_type"] for row in rows if row["_table"] == "public.u"] == ["schema", "insert"]


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
        # Rows that were written in between have the other label, and no other sign of it.
        ("mood", "TYPE mood RENAME VALUE 'ok' TO 'fine'; ALTER TYPE mood RENAME VALUE 'fine' TO 'ok'"),
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


@pytest.mark.parametrize(
    ("create", "alter", "key"),
    [
        ("SELECT", "ALTER TABLE t DROP CONSTRAINT t_pkey", ""),
        ("SELECT", "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (a)", "a"),
        ("ALTER TABLE t REPLICA IDENTITY FULL", "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (a)", "a"),
        ("ALTER TABLE t REPLICA IDENTITY USING INDEX i", "ALTER TABLE t REPLICA IDENTITY USING INDEX j", "id, a"),
        ("ALTER TABLE t REPLICA IDENTITY USING INDEX i", "DROP INDEX i", ""),
    ],
)
def test_another_key_is_said_without_a_row(drive: Drive, pg: Session, create: str, alter: str, key: str) -> None:
    run(pg, *TABLES[:2], "ALTER TABLE t ALTER a SET NOT NULL", f"CREATE PUBLICATION {SLOT} FOR TABLE t")
    run(pg, "CREATE UNIQUE INDEX i ON t (a)", "CREATE UNIQUE INDEX j ON t (a, id)", create)
    driver = drive(tables="public.t", onSchemaChange="emit")
    wait_until(lambda: not driver.batch() and driver.offset.done == len(driver.offset.tables))
    driver.rows.clear()
    # The catalog was compared once.
    go_to_end_of_wal(driver, pg)
    run(pg, alter)
    assert said(read_until(driver, lambda: bool(said(driver.rows)))) == [("rekeyed", key, None)]


def test_rows_from_before_it_do_not_hide_it(drive: Drive, pg: Session) -> None:
    """They are decoded behind the look that has found it, and come with the columns of before."""
    driver = standing(drive, pg)
    driver.stop()
    run(pg, "INSERT INTO t VALUES (3)", "ALTER TABLE t ADD b int DEFAULT 5")
    driver.start()
    rows = read_until(driver, lambda: bool(said(driver.rows)))
    assert said(rows) == [("added", "b", "5")]


def test_a_row_between_two_of_them_does_not_hide_the_second(drive: Drive, pg: Session) -> None:
    """It is decoded behind the look that has found both, and says the first."""
    driver = standing(drive, pg)
    driver.stop()
    run(pg, "ALTER TABLE t ADD b int DEFAULT 5", "INSERT INTO t VALUES (3)", "ALTER TABLE t ADD c int DEFAULT 6")
    driver.start()
    rows = read_until(driver, lambda: len(said(driver.rows)) > 1)
    assert said(rows) == [("added", "b", "5"), ("added", "c", "6")]


def test_a_schema_that_was_renamed_is_said_without_a_row(drive: Drive, pg: Session) -> None:
    run(pg, "CREATE SCHEMA x", "CREATE TABLE x.t (id int PRIMARY KEY)", f"CREATE PUBLICATION {SLOT} FOR TABLE x.t")
    driver = drive(tables="*", onSchemaChange="emit")
    wait_until(lambda: not driver.batch() and driver.offset.done == len(driver.offset.tables))
    go_to_end_of_wal(driver, pg)
    run(pg, "ALTER SCHEMA x RENAME TO y")
    read_until(driver, lambda: said(driver.rows, "y.t") == [("renamed", "y.t", None)])


@pytest.mark.parametrize("statement", ["TRUNCATE t", "ALTER TABLE t ALTER a SET STATISTICS 5", "VACUUM t"])
def test_it_is_said_once_whatever_comes_behind_it(drive: Drive, pg: Session, statement: str) -> None:
    driver = standing(drive, pg)
    run(pg, "ALTER TABLE t ADD b int DEFAULT 5")
    read_until(driver, lambda: bool(said(driver.rows)))
    run(pg, statement, "INSERT INTO t VALUES (3)", "INSERT INTO u VALUES (1)")
    rows = read_until(driver, lambda: [row["_table"] for row in driver.rows if row["after"]][-1:] == ["public.u"])
    go_to_end_of_wal(driver, pg)
    assert said(rows) == [("added", "b", "5")]


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark does not tell a Python source that it is to end")
def test_rows_that_are_due_come_though_the_table_is_altered_again(drive: Drive, pg: Session) -> None:
    driver = standing(drive, pg)
    run(pg, "ALTER TABLE t ALTER a TYPE bigint USING a * 10")
    read_until(driver, lambda: bool(said(driver.rows)))
    driver.stop()
    run(pg, "ALTER TABLE t ADD b int DEFAULT 5")
    driver.start_available_now()
    while driver.attempt(read=False) is not None:
        driver.batch()
    come = [json.loads(row["after"]) for row in driver.rows if row["_change_type"] == "snapshot"]
    assert sorted(row["id"] for row in come) == [1, 2]
    assert all(row["a"] == 10 * row["id"] and row["b"] == 5 for row in come)


@pytest.mark.parametrize("alter", ["ADD b int DEFAULT 5", "RENAME a TO c", "DROP a"])
def test_rows_of_a_point_before_it_was_said_have_it_said_again(
    drive: Drive, pg: Session, monkeypatch: pytest.MonkeyPatch, alter: str
) -> None:
    """A table joins at a point that was taken for another one, before it was altered and its rows were asked for."""
    batches: list[list[Row]] = []
    driver = standing(drive, pg)
    driver.rows.clear()

    def until(is_so: Callable[[], object]) -> None:
        def step() -> object:
            batches.append(driver.batch())
            return is_so()

        wait_until(step)

    take, late = Joining.take, threading.Event()
    monkeypatch.setattr(Joining, "take", lambda self, *patience: take(self, *patience) if late.is_set() else None)
    ask_for(pg, "public.u")
    until(lambda: driver.offset.due == ("public.u",))
    held = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pgcdc:s:snapshot' AND state LIKE 'idle in%'"
    until(lambda: run(pg, held) and not run(pg, "SELECT 1 FROM pg_replication_slots WHERE temporary"))
    run(pg, f"ALTER TABLE t {alter}")
    until(lambda: any(map(said, batches)))
    ask_for(pg, "public.t")
    until(lambda: len(driver.offset.due) == 2)
    late.set()
    until(lambda: not driver.offset.due)
    assert driver.again() == batches[-1]
    run(pg, "INSERT INTO t (id) VALUES (7)")
    until(lambda: any(row["_change_type"] == "insert" for row in driver.rows))
    columns = [
        [column["name"] for column in json.loads(row["after"])["columns"]]
        for row in driver.rows
        if (row["_table"], row["_change_type"]) == ("public.t", "schema")
    ]
    present = (
        "SELECT attname::text FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped"
    )
    assert columns[-1] == [name for (name,) in run(pg, f"{present} ORDER BY attnum")]


def test_a_label_that_came_later_and_was_renamed_is_noticed(drive: Drive, pg: Session) -> None:
    """ADD VALUE brings no columns with the next row: what is known of the type is brought up by a look."""
    run(pg, "CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE TABLE m (id int PRIMARY KEY, mood mood)")
    run(pg, "INSERT INTO m VALUES (1, 'sad')", f"CREATE PUBLICATION {SLOT} FOR TABLE m")
    driver = drive(tables="public.m", onSchemaChange="emit", onNewTable="snapshot")
    wait_until(lambda: not driver.batch() and driver.offset.done == len(driver.offset.tables))
    run(pg, "INSERT INTO m VALUES (2, 'ok')", "ALTER TYPE mood ADD VALUE 'glad'", "INSERT INTO m VALUES (3, 'glad')")
    read_until(driver, lambda: [row["_change_type"] for row in driver.rows].count("insert") == 2)
    wait_for_a_look(driver)
    driver.rows.clear()
    run(pg, "ALTER TYPE mood RENAME VALUE 'glad' TO 'happy'")
    rows = read_until(driver, lambda: len([row for row in driver.rows if row["_change_type"] == "snapshot"]) == 3)
    assert "happy" in {json.loads(row["after"])["mood"] for row in rows if row["_change_type"] == "snapshot"}


@pytest.mark.parametrize(
    ("types", "column", "alter"),
    [
        ("CREATE TABLE inside (a int); CREATE TYPE outer_type AS (x inside)", "outer_type", "TABLE inside ADD b int"),
        ("CREATE TABLE inside (a int); CREATE DOMAIN of_table AS inside", "of_table", "TABLE inside ADD b int"),
        ("CREATE TYPE e AS ENUM ('a'); CREATE TYPE r AS RANGE (SUBTYPE = e)", "r", "TYPE e RENAME VALUE 'a' TO 'b'"),
        (
            "CREATE TYPE e AS ENUM ('a'); CREATE TYPE r AS RANGE (SUBTYPE = e, MULTIRANGE_TYPE_NAME = rs)",
            "rs",
            "TYPE e RENAME VALUE 'a' TO 'b'",
        ),
    ],
)
def test_types_within_types_count(drive: Drive, pg: Session, types: str, column: str, alter: str) -> None:
    if column == "rs" and pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has multiranges")
    run(pg, types, f"CREATE TABLE m (id int PRIMARY KEY, x {column})", "INSERT INTO m VALUES (1)")
    run(pg, f"CREATE PUBLICATION {SLOT} FOR TABLE m")
    driver = drive(tables="public.m", onSchemaChange="emit", onNewTable="snapshot")
    wait_until(lambda: not driver.batch() and driver.offset.done == len(driver.offset.tables))
    wait_for_a_look(driver)
    run(pg, f"ALTER {alter}")
    read_until(driver, lambda: said(driver.rows, "public.m") == [("rewritten", None, None)])


def test_a_start_where_the_wal_stands_still_finds_it(
    drive: Drive, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream ended behind the DDL, before it looked."""
    driver = standing(drive, pg)
    wait_for_a_look(driver)
    with monkeypatch.context() as patched:
        patched.setattr(LookPace, "is_due", lambda self: False)
        run(pg, "ALTER TABLE t ADD b int DEFAULT 5")
        go_to_end_of_wal(driver, pg)
        driver.stop()
    driver.start()
    assert said(read_until(driver, lambda: bool(said(driver.rows)))) == [("added", "b", "5")]
    run(pg, "INSERT INTO t (id) VALUES (7)")
    rows = read_until(driver, lambda: any(row["_change_type"] == "insert" for row in driver.rows))
    assert said(rows) == [("added", "b", "5")]
