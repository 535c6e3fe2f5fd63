"""``onSchemaChange=emit``: a row says what the columns are, right before the first row that has them.

Each batch is run twice, the second time in a new process: after DDL, restarts and all, its rows are the same.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from driving import Drive, Driver, Row, kinds, run, values
from layout_mirror import Mirror
from psycopg2.extensions import connection as Session
from replica import Replica, rows_of
from synchronous import waiting_for_a_standby
from watch import wait_until

from pg_cdc_source.postgres import horizon
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.protocol.table_layout import from_text
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream.joining import Joining

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, a int, b varchar(10))",
    "INSERT INTO t VALUES (1, 10, 'a')",
)
EMIT = {"tables": "public.*", "onSchemaChange": "emit"}


def said(rows: Sequence[Row]) -> list[Any]:
    """Of each row what it is: of one that says the columns, their names and what changed; else its object."""
    shown: list[Any] = []
    for row in rows:
        if row["_change_type"] != "schema":
            shown.append(json.loads(row["after"] or row["key"]))
            continue
        layout = json.loads(row["after"])
        changes = [
            " ".join(str(c[k]) for k in ("change", "attnum", "name", "was", "fill") if c[k] is not None)
            for c in layout["changes"]
        ]
        shown.append((" ".join(column["name"] for column in layout["columns"]), changes))
    return shown


def take(driver: Driver, count: int) -> list[Row]:
    """Run batches until they have brought so many rows, each of them twice; the rows."""
    rows: list[Row] = []
    for _ in range(400):
        if len(rows) >= count and driver.offset.done == len(driver.offset.tables):
            break
        batch = driver.batch()
        if batch:
            assert driver.again() == batch
        rows += batch
    assert len(rows) == count, rows
    return rows


@pytest.mark.matrix("onSchemaChange=emit")
def test_the_first_rows_are_preceded_by_their_columns(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(**EMIT)
    schema, row = take(driver, 2)
    assert json.loads(schema["after"]) == {
        "columns": [
            {"name": "id", "attnum": 1, "type": "integer", "type_oid": 23, "spark": "int", "nullable": False,
             "key": True},
            {"name": "a", "attnum": 2, "type": "integer", "type_oid": 23, "spark": "int", "nullable": True,
             "key": False},
            {"name": "b", "attnum": 3, "type": "character varying(10)", "type_oid": 1043, "spark": "string",
             "nullable": True, "key": False},
        ],
        "changes": [],
    }  # fmt: skip
    assert values([schema], "_table", "_change_type", "_seq", "_commit_ts", "_xid", "_unchanged", "key", "before") == [
        ("public.t", "schema", 0, None, None, [], None, None)
    ]
    assert (row["_change_type"], row["_commit_lsn"]) == ("snapshot", schema["_commit_lsn"])
    run(pg, "INSERT INTO t VALUES (2, 20, 'b')")
    assert said(take(driver, 1)) == [{"id": 2, "a": 20, "b": "b"}]
    driver.restart()
    run(pg, "UPDATE t SET a = 21 WHERE id = 2")
    assert said(take(driver, 1)) == [{"id": 2, "a": 21, "b": "b"}]


@pytest.mark.parametrize("options", [{"startFrom": "now"}, {"startFrom": "slot"}])
def test_without_a_snapshot_the_first_change_is_preceded_by_the_columns(
    options: dict[str, str], pg: Session, drive: Drive
) -> None:
    run(pg, *TABLE, "CREATE PUBLICATION s FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")  # fmt: skip
    driver = drive(**EMIT, **options)
    # Before 4.2, the batch ends with it.
    first = driver.batch()
    run(pg, "DELETE FROM t WHERE id = 1")
    assert said(first + take(driver, 2 - len(first))) == [("id a b", []), {"id": 1}]
    run(pg, "INSERT INTO t VALUES (2, 20, 'b')")
    assert said(take(driver, 1)) == [{"id": 2, "a": 20, "b": "b"}]


# What is done to the table, and then written; what is said of it.
ROW = "INSERT INTO t (id) VALUES (2)"
CHANGES: dict[str, tuple[str, tuple[str, list[str]]]] = {
    "add": ("ALTER TABLE t ADD c int", ("id a b c", ["added 4 c"])),
    "add with a default": ("ALTER TABLE t ADD c text DEFAULT 'x y'", ("id a b c", ["added 4 c x y"])),
    "add with a volatile default": (
        "ALTER TABLE t ADD c float8 DEFAULT random()",
        ("id a b c", ["added 4 c", "rewritten"]),
    ),
    "drop": ("ALTER TABLE t DROP a", ("id b", ["dropped 2 a"])),
    "rename": ("ALTER TABLE t RENAME a TO x", ("id x b", ["renamed 2 x a"])),
    "swap": (
        "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b",
        ("id b a", ["renamed 2 b a", "renamed 3 a b"]),
    ),
    "widen": ("ALTER TABLE t ALTER b TYPE text", ("id a b", ["retyped 3 b character varying(10)"])),
    "retype": ("ALTER TABLE t ALTER a TYPE bigint", ("id a b", ["retyped 2 a integer", "rewritten"])),
    "compute": ("ALTER TABLE t ALTER a TYPE int USING a * 2", ("id a b", ["rewritten"])),
    "drop and add again": (
        "ALTER TABLE t DROP b; ALTER TABLE t ADD b varchar(10)",
        ("id a b", ["dropped 3 b", "added 4 b", "rewritten"]),
    ),
    "rekey": ("ALTER TABLE t REPLICA IDENTITY FULL", ("id a b", ["rekeyed id id"])),
    "rename table": ("ALTER TABLE t RENAME TO u", ("id a b", ["renamed public.u public.t"])),
}


# What the server sends does not show these. So they may be said before rows that the catalog is ahead of; then all rows
# of the table come again.
EARLY = ("compute", "drop and add again")


@pytest.mark.parametrize("how", ["one transaction", "several", "while it is down"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_said_right_before_its_first_row(change: str, how: str, pg: Session, drive: Drive) -> None:
    ddl, expected = CHANGES[change]
    run(pg, *TABLE)
    driver = drive(**EMIT)
    take(driver, 2)
    if how == "while it is down":
        driver.stop()
    table = "u" if change == "rename table" else "t"
    inserts = [ROW.replace("2)", f"{i})").replace(" t ", f" {table} ") for i in (3, 4)]
    statements = ["INSERT INTO t VALUES (2, 20, 'b')", ddl, *inserts]
    if how == "one transaction":
        run(pg, f"BEGIN; {'; '.join(statements)}; COMMIT")
    else:
        run(pg, *statements)
    if how == "while it is down":
        driver.start()
    if how == "while it is down" and not HAS_LIMITS and "rewritten" in expected[1]:
        # The first batch of a process ends with the rows that come again.
        rows = sorted(take(driver, 9), key=lambda row: (row["_commit_lsn"], row["_seq"]))
        assert kinds(rows[4:]) == ["truncate", *["snapshot"] * 4]
        rows = rows[:4]
    else:
        rows = take(driver, 4)
    if change in EARLY and rows[0]["_change_type"] == "schema":
        rows = [rows[1], rows[0], *rows[2:]]
        assert rows[0]["_commit_lsn"] == rows[1]["_commit_lsn"]
        rows[1] |= {name: rows[2][name] for name in ("_commit_lsn", "_seq", "_xid")}
    before, schema, first, second = said(rows)
    assert (before, schema) == ({"id": 2, "a": 20, "b": "b"}, expected)
    assert (first["id"], second["id"]) == (3, 4)
    assert values([rows[1]], "_commit_lsn", "_seq", "_xid") == values([rows[2]], "_commit_lsn", "_seq", "_xid")
    assert {row["_table"] for row in rows[1:]} == {f"public.{table}"}


@pytest.mark.matrix("onSchemaChange=emit")
def test_many_changes_in_a_backlog_are_told_apart(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(**EMIT)
    take(driver, 2)
    driver.stop()
    run(pg, "ALTER TABLE t ADD c int DEFAULT 5", "INSERT INTO t VALUES (2, 20, 'b', 2)",
        "ALTER TABLE t RENAME a TO x", "INSERT INTO t VALUES (3, 30, 'c', 3)",
        "ALTER TABLE t DROP x", "INSERT INTO t VALUES (4, 'd', 4)",
        "ALTER TABLE t ADD a int", "INSERT INTO t VALUES (5, 'e', 5, 55)",
        "INSERT INTO t VALUES (6, 'f', 6, 66)")  # fmt: skip
    driver.start()
    assert said(take(driver, 9)) == [
        ("id a b c", ["added 4 c 5"]),
        {"id": 2, "a": 20, "b": "b", "c": 2},
        ("id x b c", ["renamed 2 x a"]),
        {"id": 3, "x": 30, "b": "c", "c": 3},
        ("id b c", ["dropped 2 x"]),
        {"id": 4, "b": "d", "c": 4},
        ("id b c a", ["added 5 a"]),
        {"id": 5, "b": "e", "c": 5, "a": 55},
        {"id": 6, "b": "f", "c": 6, "a": 66},
    ]


def test_a_changed_key_gives_deletes_their_key(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, code int NOT NULL UNIQUE)", "INSERT INTO t VALUES (1, 10), (2, 20)")
    driver = drive(**EMIT)
    take(driver, 3)
    run(pg, "DELETE FROM t WHERE id = 1", "ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key",
        "DELETE FROM t WHERE id = 2")  # fmt: skip
    assert said(take(driver, 3)) == [{"id": 1}, ("id code", ["rekeyed code id"]), {"code": 20}]
    driver.restart()
    run(pg, "INSERT INTO t VALUES (3, 30)")
    assert values(take(driver, 1), "key") == [('{"code":30}',)]


@pytest.mark.corner
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_a_restart_says_no_change_where_there_is_none(identity: str, pg: Session, drive: Drive) -> None:
    run(pg, *TABLE, f"ALTER TABLE t REPLICA IDENTITY {identity}")
    driver = drive(**EMIT)
    take(driver, 2)
    run(pg, "UPDATE t SET a = 11")
    assert kinds(take(driver, 1)) == ["update"]
    driver.stop()
    run(pg, "UPDATE t SET a = 12")
    driver.start()
    assert kinds(take(driver, 1)) == ["update"]


def test_a_layout_and_its_row_come_in_one_batch(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(**EMIT, maxRowsPerBatch="1")
    take(driver, 2)
    run(pg, "BEGIN; INSERT INTO t VALUES (2, 20, 'b'); ALTER TABLE t ADD c int; INSERT INTO t VALUES (3, 30, 'c', 1);"
            " UPDATE t SET c = 5 WHERE id = 3; COMMIT")  # fmt: skip
    batches: list[list[Row]] = []
    for _ in range(200):
        if sum(map(len, batches)) >= 4:
            break
        if batch := driver.batch():
            assert driver.again() == batch
            batches.append(batch)
    assert list(map(kinds, batches)) == [["insert"], ["schema", "insert"], ["update"]]


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
@pytest.mark.parametrize(
    "alter", ["ADD c int DEFAULT 5", "DROP b", "RENAME b TO c", "ALTER b TYPE text", "ALTER a TYPE text"]
)
@pytest.mark.parametrize(("written", "ends"), [(True, True), (True, False), (False, True)])
def test_rows_that_are_read_after_a_change_of_the_columns_have_those_that_were_said(
    written: bool, ends: bool, alter: str, identity: str, pg: Session, drive: Drive
) -> None:
    run(pg, *TABLE, f"ALTER TABLE t REPLICA IDENTITY {identity}", "INSERT INTO t VALUES (2, 20, 'b')")
    driver = drive(**EMIT)
    wait_until(lambda: driver.plan(read=False))
    run(pg, *(["UPDATE t SET a = 11 WHERE id = 1"] if written else []), f"ALTER TABLE t {alter}")
    if ends:
        driver.restart()
    mirror = Mirror()
    said = json.loads(driver.batch()[0]["after"])
    assert [column["name"] for column in said["columns"]] == ["id", "a", "b"]
    run(pg, "UPDATE t SET a = '12' WHERE id = 1")
    wait_until(lambda: driver.batch() and "12" in driver.rows[-1]["after"])
    while driver.offset.due:
        driver.batch()
    rows = sorted(driver.rows, key=lambda row: (row["_commit_lsn"], row["_seq"], row["_change_type"] != "schema"))
    for row in rows:
        mirror.apply(row)
    there = {row["id"]: row for (row,) in run(pg, "SELECT to_jsonb(t) FROM t")}
    names = {number: name for name, number in mirror.columns.items()}
    assert {
        ident: {names[number]: str(value) for number, value in row.items()} for ident, row in mirror.rows.items()
    } == {ident: {name: str(value) for name, value in row.items()} for ident, row in there.items()}


def test_what_rewrites_a_table_without_a_change_is_not_said(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(**EMIT)
    take(driver, 2)
    run(pg, "VACUUM FULL t", "ANALYZE t", "INSERT INTO t VALUES (2, 20, 'b')")
    assert said(take(driver, 1)) == [{"id": 2, "a": 20, "b": "b"}]
    run(pg, "ALTER TABLE t ALTER a SET DEFAULT 5", "INSERT INTO t VALUES (3, 30, 'c')")
    assert said(driver.take(1)) == [{"id": 3, "a": 30, "b": "c"}]
    run(pg, "ALTER TABLE t ADD c int", "INSERT INTO t VALUES (4, 40, 'd')")
    assert said(driver.take(2)) == [("id a b c", ["added 4 c"]), {"id": 4, "a": 40, "b": "d", "c": None}]
    run(pg, "ALTER TABLE t ADD d int DEFAULT 7", "INSERT INTO t VALUES (5, 50, 'e')")
    assert said(driver.take(2))[0] == ("id a b c d", ["added 5 d 7"])
    run(pg, "VACUUM FULL t", "INSERT INTO t VALUES (6, 60, 'f')")
    assert said(driver.take(1)) == [{"id": 6, "a": 60, "b": "f", "c": None, "d": 7}]


@pytest.mark.corner
def test_rows_come_under_the_new_name_of_a_schema(pg: Session, drive: Drive) -> None:
    """Before PostgreSQL 16 a session goes on with the old one."""
    run(pg, "CREATE SCHEMA a", "CREATE TABLE a.t (id int PRIMARY KEY)", "INSERT INTO a.t VALUES (0)")
    driver = drive(tables="*", onSchemaChange="emit")
    driver.take(2)
    run(pg, "INSERT INTO a.t VALUES (1)")
    assert said(driver.take(1)) == [{"id": 1}]
    for ident, (was, now) in enumerate((("a", "b"), ("b", "c")), 2):
        # Rows of before that are not read yet have the old name.
        rows = [] if now == "b" else [(f"{was}.t", {"id": 20})]
        run(pg, *(f"INSERT INTO {was}.t VALUES (20)" for _ in rows), f"ALTER SCHEMA {was} RENAME TO {now}")
        found = driver.take(1 + len(rows))
        assert [(row["_table"], *said([row])) for row in found] == [
            *rows, (f"{now}.t", ("id", [f"renamed {now}.t {was}.t"]))
        ]  # fmt: skip
        run(pg, f"INSERT INTO {now}.t VALUES ({ident})")
        (row,) = driver.take(1)
        assert (row["_table"], said([row])) == (f"{now}.t", [{"id": ident}])


@pytest.mark.corner
def test_ddl_that_waits_for_a_synchronous_standby_is_waited_for(
    db: str, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The catalog that everybody sees has the columns of before, and as many: that would be a rename."""
    if pg.server_version >= 160000:
        pytest.skip("reading a publication waits for who has locked its tables")
    monkeypatch.setattr(horizon, "_WAITING", Backoff(0.01, within_seconds=0.2))
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'a')")
    driver = drive(**EMIT)
    take(driver, 2)
    rows: list[Row] = []
    altered = "ALTER TABLE t DROP a, ADD b text DEFAULT 'x'; INSERT INTO t VALUES (2, 'b')"
    with waiting_for_a_standby(db, pg, altered):

        def is_waited_for() -> bool:
            rows.extend(driver.batch() or ())
            return bool(rows) or "cannot be seen yet" in caplog.text

        wait_until(is_waited_for)
    rows.extend(take(driver, 2 - len(rows)))
    assert said(rows) == [("id b", ["dropped 2 a", "added 3 b x", "rewritten"]), {"id": 2, "b": "b"}]


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark says what is rewritten when the batch is over")
@pytest.mark.parametrize("ddl_is_in_the_rows", [True, False])
def test_a_table_that_is_rewritten_while_another_joins_comes_again_behind_it(
    ddl_is_in_the_rows: bool, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, *TABLE, "CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1), (2)")
    driver = drive(**EMIT)
    batches: list[list[Row]] = []

    def until(condition: Callable[[], object]) -> None:
        def is_so() -> object:
            batches.append(driver.batch())
            return condition()

        wait_until(is_so)

    until(lambda: kinds(driver.rows).count("snapshot") == 3)
    take, late = Joining.take, threading.Event()
    monkeypatch.setattr(Joining, "take", lambda self, *patience: take(self, *patience) if late.is_set() else None)
    ddl = "ALTER TABLE u ADD n serial"
    run(pg, *[ddl] * ddl_is_in_the_rows, "ALTER TABLE t ALTER a TYPE bigint", "INSERT INTO t VALUES (2, 20, 'b')")
    # A look at the catalog finds u, too, where it is rewritten by now.
    until(lambda: "public.t" in driver.offset.due)
    held = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pgcdc:s:snapshot' AND state LIKE 'idle in%'"
    until(lambda: run(pg, held) and not run(pg, "SELECT 1 FROM pg_replication_slots WHERE temporary"))
    run(pg, *[ddl] * (not ddl_is_in_the_rows), "INSERT INTO u (id) VALUES (3)")
    until(lambda: driver.offset.due == ("public.t", "public.u"))
    late.set()
    until(lambda: not driver.offset.due)
    replica = Replica()
    for batch in batches:
        replica.apply(batch)
    assert {name: replica.rows(f"public.{name}") for name in "tu"} == {name: rows_of(pg, name) for name in "tu"}


def test_a_table_that_is_altered_behind_the_point_at_which_it_joins_has_its_columns_after_a_crash(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is past the point, without the table's changes, when the point becomes known."""
    run(pg, *TABLE, "CREATE TABLE u (id int PRIMARY KEY, v text)", "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(**EMIT)
    take(driver, 2)
    driver.restart()
    # Before Spark 4.2, what there is when a process begins joins with its first batch.
    run(pg, "INSERT INTO t VALUES (9, 90, 'i')")
    driver.take(1)
    join, late = Joining.take, threading.Event()
    monkeypatch.setattr(Joining, "take", lambda self, *patience: join(self, *patience) if late.is_set() else None)
    run(pg, "ALTER PUBLICATION s ADD TABLE u")
    held = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pgcdc:s:snapshot' AND state LIKE 'idle in%'"
    made = "SELECT 1 FROM pg_replication_slots WHERE temporary"
    wait_until(lambda: not driver.batch() and run(pg, held) and not run(pg, made))
    run(pg, "INSERT INTO u VALUES (1, 'first')", "ALTER TABLE u ADD n int", "INSERT INTO u VALUES (2, 'second', 2)",
        "INSERT INTO t VALUES (2, 20, 'b')")  # fmt: skip
    # In no new process, which would take a later point.
    driver.take(1)
    late.set()
    wait_until(lambda: driver.plan(read=False))
    driver.restart()
    batch = driver.batch()
    changes = [row for row in batch if row["_change_type"] not in ("snapshot", "truncate")]
    assert said(changes) == [
        ("id v", []),
        {"id": 1, "v": "first"},
        ("id v n", ["added 3 n"]),
        {"id": 2, "v": "second", "n": 2},
    ]
    run(pg, "ALTER TABLE u ADD behind int")
    assert driver.again() == batch


def test_the_rows_of_a_rewritten_table_come_again(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE, "CREATE TABLE other (id int PRIMARY KEY)")
    driver = drive(**EMIT)
    take(driver, 3)
    run(pg, "ALTER TABLE t ADD c int DEFAULT (random() * 0)::int + 5", "INSERT INTO t VALUES (2, 20, 'b', 6)")
    rows: list[Row] = []
    for _ in range(200):
        batch = driver.batch()
        if batch:
            assert driver.again() == batch
        rows += batch
        if kinds(rows).count("snapshot") == 2:
            break
    first, last = rows[:2], sorted(rows[2:], key=lambda row: (row["_commit_lsn"], row["_change_type"] != "schema"))
    assert said(first) == [("id a b c", ["added 4 c", "rewritten"]), {"id": 2, "a": 20, "b": "b", "c": 6}]
    assert kinds(last) == ["truncate", "schema", "snapshot", "snapshot"]
    assert said(last[1:]) == [
        ("id a b c", []),
        {"id": 1, "a": 10, "b": "a", "c": 5},
        {"id": 2, "a": 20, "b": "b", "c": 6},
    ]
    run(pg, "INSERT INTO t VALUES (3, 30, 'c', 7)")
    assert said(take(driver, 1)) == [{"id": 3, "a": 30, "b": "c", "c": 7}]


OTHERS = ("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
between_batches = pytest.mark.skipif(not HAS_LIMITS, reason="this Spark reads all tables in the first batch")


def begun(pg: Session, drive: Drive, *statements: str) -> Driver:
    """A stream whose first batch has read the table ``a``, and not yet ``u``, which the statements make."""
    run(pg, *OTHERS, *statements, "CREATE PUBLICATION s FOR TABLE a, u")
    driver = drive(**EMIT)
    wait_until(driver.batch)
    assert (driver.offset.tables, driver.offset.done) == (("public.a", "public.u"), 1)
    return driver


def in_order(batch: list[Row]) -> list[Row]:
    """A batch of one table's rows, the one that says the columns first: those that were turned back come first."""
    return sorted(batch, key=lambda row: (row["_change_type"] != "schema", row["after"]))


@between_batches
@pytest.mark.parametrize(
    ("ddl", "written"),
    [
        ("ALTER TABLE u RENAME id TO ident", False),
        ("ALTER TABLE u RENAME id TO ident", True),
        (
            "BEGIN; ALTER TABLE u RENAME id TO x; ALTER TABLE u RENAME v TO id; ALTER TABLE u RENAME x TO v; COMMIT",
            True,
        ),
    ],
    ids=["renamed", "renamed, written", "swapped, written"],
)
def test_rows_are_turned_back_by_a_key_whose_column_was_renamed(
    ddl: str, written: bool, pg: Session, drive: Drive
) -> None:
    driver = begun(pg, drive, "CREATE TABLE u (id int PRIMARY KEY, v int NOT NULL)",
        "ALTER TABLE u REPLICA IDENTITY FULL", "INSERT INTO u VALUES (1, 10), (2, 1), (3, 30)")  # fmt: skip
    run(pg, *["UPDATE u SET v = 11 WHERE id = 1"] * written, ddl)
    batch = driver.batch()
    assert said(in_order(batch)) == [("id v", []), {"id": 1, "v": 10}, {"id": 2, "v": 1}, {"id": 3, "v": 30}]


@between_batches
def test_a_column_that_is_dropped_and_added_again_before_its_rows_are_read_is_another_one(
    pg: Session, drive: Drive
) -> None:
    driver = begun(pg, drive, "CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'a')")
    run(pg, "ALTER TABLE u DROP v, ADD v text DEFAULT 'other'")
    batch = driver.batch()
    assert said(batch) == [("id v", []), {"id": 1, "v": None}]
    assert batch[1]["_unchanged"] == ["v"]
    assert driver.again() == batch


REKEY = {
    "index": "CREATE UNIQUE INDEX u_code ON u (code); ALTER TABLE u REPLICA IDENTITY USING INDEX u_code",
    "primary": "ALTER TABLE u DROP CONSTRAINT u_pkey; ALTER TABLE u ADD PRIMARY KEY (code)",
    "full": "ALTER TABLE u DROP CONSTRAINT u_pkey; ALTER TABLE u REPLICA IDENTITY FULL",
}


@between_batches
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("ddl", REKEY.values(), ids=REKEY)
def test_rows_have_the_key_that_is_said_before_them(ddl: str, restarted: bool, pg: Session, drive: Drive) -> None:
    driver = begun(pg, drive, "CREATE TABLE u (id int PRIMARY KEY, code int NOT NULL)",
        "INSERT INTO u VALUES (1, 10), (2, 20)")  # fmt: skip
    run(pg, "UPDATE u SET code = 11 WHERE id = 1", ddl)
    if restarted:
        driver.restart()
    rows = driver.batch()
    assert [(c["name"], c["key"]) for c in json.loads(rows[0]["after"])["columns"]] == [("id", True), ("code", False)]
    assert values(in_order(rows)[1:], "key") == [('{"id":1}',), ('{"id":2}',)]


@between_batches
@pytest.mark.parametrize("restarted", [False, True])
def test_rows_are_turned_back_by_an_identity_that_became_full(restarted: bool, pg: Session, drive: Drive) -> None:
    driver = begun(pg, drive, "CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'a'), (2, 'b')")
    run(pg, "ALTER TABLE u REPLICA IDENTITY FULL", "UPDATE u SET v = 'later' WHERE id = 1", "VACUUM FULL u")
    if restarted:
        driver.restart()
    batch = driver.batch()
    assert said(in_order(batch)) == [("id v", []), {"id": 1, "v": "a"}, {"id": 2, "v": "b"}]
    assert driver.again() == batch


def test_a_partition_that_is_created_behind_a_default_brings_no_row_again(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE r_1 PARTITION OF r FOR VALUES FROM (0) TO (10)", "INSERT INTO r VALUES (1), (2)",
        "CREATE PUBLICATION s FOR TABLE r WITH (publish_via_partition_root)")  # fmt: skip
    driver = drive(**EMIT)
    take(driver, 3)
    run(pg, "ALTER TABLE r ADD b int DEFAULT 5", "CREATE TABLE r_2 PARTITION OF r FOR VALUES FROM (10) TO (20)",
        "INSERT INTO r VALUES (11, 1)", "INSERT INTO r VALUES (12, 2)")  # fmt: skip
    assert said(take(driver, 3)) == [("id b", ["added 2 b 5"]), {"id": 11, "b": 1}, {"id": 12, "b": 2}]
    assert driver.offset.due == ()


def test_offsets_have_the_layouts_of_the_tables_that_are_there(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE, "CREATE PUBLICATION s FOR ALL TABLES")
    driver = drive(**EMIT)
    take(driver, 2)
    for _ in range(3):
        run(pg, "BEGIN; CREATE TABLE u (id int PRIMARY KEY); INSERT INTO u VALUES (1); COMMIT")
        assert kinds(take(driver, 3)) == ["truncate", "schema", "snapshot"]
        run(pg, "DROP TABLE u")
        assert kinds(take(driver, 1)) == ["schema"]
    run(pg, "UPDATE t SET a = 2")
    assert kinds(take(driver, 1)) == ["update"]
    (there,) = driver.members
    assert [record.layout.oid for record in from_text(driver.offset.layouts)] == [there.oid]
