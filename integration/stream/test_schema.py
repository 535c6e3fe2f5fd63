"""What becomes of a stream when its tables change: TOAST, TRUNCATE, DDL, publications, partitions.

Most tests ask the reader what Spark asks it, in Spark's order and without Spark: so they see between the batches. The
last ones run queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from driving import SLOT, Drive, Driver, is_one_commit, kinds, querying, refusal_of, run, values
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from synchronous import before_horizon, waiting_for_a_standby

from pg_cdc_source import collapse
from pg_cdc_source.errors import OptionError, PgCdcError, SchemaChangedError, ServerSetupError
from pg_cdc_source.spark.pgcdc import HAS_LIMITS, PgCdcDataSource
from pg_cdc_source.stream.tables.look_pace import LookPace

# A value that is stored out of line: long, and not to be compressed.
BIG = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 200) AS n)"


@pytest.fixture
def toasted(pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, n int, big text, raw bytea)")
    run(pg, "ALTER TABLE t ALTER big SET STORAGE EXTERNAL, ALTER raw SET STORAGE EXTERNAL")


# --- TOAST -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toasted")
def test_a_value_that_did_not_travel_is_listed(pg: Session, drive: Drive) -> None:
    run(pg, f"INSERT INTO t SELECT 1, 0, {BIG}, {BIG}::bytea")
    (big,) = run(pg, "SELECT big FROM t")[0]
    driver = drive(dbtable="t")
    driver.take(1)
    run(pg, "UPDATE t SET n = 1", "UPDATE t SET big = NULL", "UPDATE t SET n = 2, raw = 'x'", "UPDATE t SET id = 2")
    run(pg, f"UPDATE t SET big = {BIG}", "UPDATE t SET id = 3", "DELETE FROM t")
    rows = driver.take(9)
    assert values(rows, "_change_type", "id", "n", "big", "raw", "_unchanged") == [
        ("update", 1, 1, None, None, ["big", "raw"]),
        ("update", 1, 1, None, None, ["raw"]),
        ("update", 1, 2, None, b"x", []),
        ("delete", 1, None, None, None, []),
        ("insert", 2, 2, None, b"x", []),
        ("update", 2, 2, big, b"x", []),
        ("delete", 2, None, None, None, []),
        ("insert", 3, 2, None, b"x", ["big"]),
        ("delete", 3, None, None, None, []),
    ]


@pytest.mark.usefixtures("toasted")
def test_under_full_the_old_row_has_it(pg: Session, drive: Drive) -> None:
    run(pg, "ALTER TABLE t REPLICA IDENTITY FULL", f"INSERT INTO t SELECT 1, 0, {BIG}, {BIG}::bytea")
    (big,) = run(pg, "SELECT big FROM t")[0]
    driver = drive(dbtable="t", beforeImage="true")
    driver.take(1)
    run(pg, "UPDATE t SET n = 1", "UPDATE t SET id = 2", "UPDATE t SET raw = NULL", "DELETE FROM t")
    rows = driver.take(5)
    assert values(rows, "_change_type", "id", "n", "big", "raw", "_unchanged") == [
        ("update", 1, 1, big, big.encode(), []),
        ("delete", 1, 1, big, big.encode(), []),
        ("insert", 2, 1, big, big.encode(), []),
        ("update", 2, 1, big, None, []),
        ("delete", 2, 1, big, None, []),
    ]
    before = [None if row["_before"] is None else tuple(row["_before"].values()) for row in rows]
    raw = big.encode()
    assert before == [(1, 0, big, raw), (1, 1, big, raw), None, (2, 1, big, raw), (2, 1, big, None)]


@pytest.mark.usefixtures("toasted")
def test_in_the_envelope_it_is_left_out(pg: Session, drive: Drive) -> None:
    run(pg, f"INSERT INTO t SELECT 1, 0, {BIG}")
    driver = drive(tables="t")
    driver.take(1)
    run(pg, "UPDATE t SET n = 1", "UPDATE t SET n = NULL, big = NULL")
    rows = driver.take(2)
    assert values(rows, "after", "_unchanged") == [
        ('{"id":1,"n":1,"raw":null}', ["big"]),
        ('{"id":1,"n":null,"big":null,"raw":null}', []),
    ]


# --- TRUNCATE --------------------------------------------------------------------------------------------------------


def test_a_truncate_is_a_row(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')")
    driver = drive(dbtable="t", beforeImage="true")
    driver.take(1)
    run(pg, "BEGIN; INSERT INTO t VALUES (2, 'b'); TRUNCATE t; INSERT INTO t VALUES (3, 'c'); COMMIT")
    rows = driver.take(3)
    assert values(rows, "_change_type", "id", "v", "_before") == [
        ("insert", 2, "b", None),
        ("truncate", None, None, None),
        ("insert", 3, "c", None),
    ]
    assert is_one_commit(rows)


SHOP = (
    "CREATE TABLE orders (id int PRIMARY KEY)",
    "CREATE TABLE items (id int PRIMARY KEY, order_id int REFERENCES orders)",
    "CREATE TABLE other (id int PRIMARY KEY)",
    "CREATE TABLE unread (id int PRIMARY KEY, order_id int REFERENCES orders)",
)


@pytest.mark.matrix("TRUNCATE")
@pytest.mark.parametrize("truncate", ["TRUNCATE orders, items, unread, other", "TRUNCATE other, orders CASCADE"])
def test_each_table_that_is_truncated_has_its_row(truncate: str, pg: Session, drive: Drive) -> None:
    run(pg, *SHOP, "CREATE PUBLICATION s FOR ALL TABLES")
    driver = drive(tables="orders,items,other")
    run(pg, "INSERT INTO orders VALUES (1)")
    driver.take(1)
    run(pg, f"BEGIN; INSERT INTO other VALUES (1); {truncate}; INSERT INTO items VALUES (5, NULL); COMMIT")
    rows = driver.take(5)
    assert kinds(rows) == ["insert", "truncate", "truncate", "truncate", "insert"]
    assert {row["_table"] for row in rows[1:4]} == {"public.orders", "public.items", "public.other"}
    assert is_one_commit(rows)


def test_a_truncate_may_be_refused_or_left_out(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    driver = drive(dbtable="t", onTruncate="fail")
    driver.take(1)
    run(pg, "BEGIN; INSERT INTO t VALUES (2); TRUNCATE t; INSERT INTO t VALUES (3); COMMIT")
    # The row before it may have come: a transaction does not always arrive at once.
    driver.refusal("public.t was truncated by the commit at ", "onTruncate=emit", rows=None)
    # It stays refused until the user has decided.
    driver.restart()
    driver.refusal("public.t was truncated", rows=None)
    driver.restart(onTruncate="ignore")
    driver.take(3 - len(driver.rows))
    assert values(driver.rows[1:], "_change_type", "id") == [("insert", 2), ("insert", 3)]
    assert is_one_commit(driver.rows[1:])


# --- columns, while the query runs -----------------------------------------------------------------------------------


@pytest.mark.corner
@pytest.mark.parametrize(
    ("missed", "taken_back", "what"),
    [
        ("ALTER TABLE t ADD c int", "ALTER TABLE t DROP c", "column c was dropped or renamed"),
        ("ALTER TABLE t DROP a", "ALTER TABLE t ADD a int", "column a was added"),
    ],
)
def test_ddl_that_was_history_and_is_taken_back_is_a_change(
    missed: str, taken_back: str, what: str, pg: Session, drive: Drive
) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (0)")
    driver = drive(dbtable="t")
    driver.take(1)
    driver.stop()
    run(pg, "INSERT INTO t VALUES (1)", missed)
    driver.restart()
    assert values(driver.take(1), "id", "_change_type") == [(1, "insert")]
    # The server describes the table as it did for the row before.
    run(pg, taken_back, "INSERT INTO t VALUES (2)")
    driver.refusal(what)


@pytest.mark.corner
@pytest.mark.parametrize("altering", ["ADD c int", "DROP a, ADD c int"])
def test_ddl_that_waits_for_a_synchronous_standby_is_no_history(
    altering: str, db: str, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version >= 160000:
        pytest.skip("reading a publication waits for who has locked its tables")
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (0)")
    driver = drive(dbtable="t")
    driver.take(1)
    driver.stop()
    driver.restart()
    with ExitStack() as waiting:
        altered = f"ALTER TABLE t {altering}; INSERT INTO t (id, c) VALUES (1, 7)"
        before_horizon(monkeypatch, lambda: waiting.enter_context(waiting_for_a_standby(db, pg, altered)))
        driver.refusal("before the commit at")
    driver.restart()
    assert values(driver.take(1), "id", "c") == [(1, 7)]


# What is done to (id, a int, b varchar(10)), the rows before and after it, what the refusal says, and what comes after
# the restart.
CHANGES = {
    "add": (
        "ALTER TABLE t ADD c int DEFAULT 7",
        "INSERT INTO t VALUES (3, 30, 'c', 8)",
        "column c was added before the commit at ",
        {"id": 3, "a": 30, "b": "c", "c": 8},
    ),
    "drop": (
        "ALTER TABLE t DROP a",
        "INSERT INTO t VALUES (3, 'c')",
        "column a was dropped or renamed before the commit at ",
        {"id": 3, "b": "c"},
    ),
    "rename": (
        "ALTER TABLE t RENAME a TO x",
        "INSERT INTO t VALUES (3, 30, 'c')",
        "column a was dropped or renamed before the commit at ",
        {"id": 3, "x": 30, "b": "c"},
    ),
    "swap": (
        "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b",
        "INSERT INTO t VALUES (3, 30, 'c')",
        "the type of column ",
        {"id": 3, "b": 30, "a": "c"},
    ),
    "type": (
        "ALTER TABLE t ALTER a TYPE bigint",
        "INSERT INTO t VALUES (3, 30000000000, 'c')",
        "the type of column a was changed before the commit at ",
        {"id": 3, "a": 30000000000, "b": "c"},
    ),
    "again": (
        "ALTER TABLE t DROP a; ALTER TABLE t ADD a text",
        "INSERT INTO t VALUES (3, 'c', 'now text')",
        "the type of column a was changed before the commit at ",
        {"id": 3, "b": "c", "a": "now text"},
    ),
    "several": (
        "ALTER TABLE t ADD c int; ALTER TABLE t DROP b; ALTER TABLE t ADD d text; ALTER TABLE t DROP c",
        "INSERT INTO t VALUES (3, 30, 'd')",
        "column b was dropped or renamed before the commit at ",
        {"id": 3, "a": 30, "d": "d"},
    ),
    "rename table": (
        "ALTER TABLE t RENAME TO u",
        "INSERT INTO u VALUES (3, 30, 'c')",
        "public.t was renamed to public.u before the commit at ",
        {"id": 3, "a": 30, "b": "c"},
    ),
    "schema": (
        "CREATE SCHEMA other; ALTER TABLE t SET SCHEMA other",
        "INSERT INTO other.t VALUES (3, 30, 'c')",
        "public.t was renamed to other.t before the commit at ",
        {"id": 3, "a": 30, "b": "c"},
    ),
}
TABLE = ("CREATE TABLE t (id int PRIMARY KEY, a int, b varchar(10))", "INSERT INTO t VALUES (1, 10, 'a')")
NEW_NAME = {"rename table": "u", "schema": "other.t"}


@pytest.mark.parametrize("one_transaction", [True, False], ids=["one transaction", "several"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_stream_stops_exactly_at_ddl_and_goes_on_there(
    change: str, one_transaction: bool, pg: Session, drive: Drive
) -> None:
    ddl, insert, says, then = CHANGES[change]
    run(pg, *TABLE)
    driver = drive(dbtable="t")
    driver.take(1)
    changes = ("INSERT INTO t VALUES (2, 20, 'b')", ddl, insert)
    run(pg, *([f"BEGIN; {'; '.join(changes)}; COMMIT"] if one_transaction else changes))
    driver.refusal(says, "public.t", "same checkpoint", rows=1)
    assert values(driver.rows, "id", "a", "b") == [(1, 10, "a"), (2, 20, "b")]
    driver.restart(dbtable=NEW_NAME.get(change, "t"))
    (row,) = driver.take(1)
    assert {name: value for name, value in row.items() if not name.startswith("_")} == then
    assert row["_unchanged"] == []
    if one_transaction:
        assert is_one_commit([driver.rows[1], row])
    run(pg, insert.replace("(3,", "(4,"))
    assert driver.take(1)[0]["id"] == 4


@pytest.mark.parametrize(
    ("type_before", "type_after"), [("varchar(10)", "varchar(20)"), ("varchar(10)", "text"), ("json", "jsonb")]
)
def test_a_type_that_reads_the_same_is_no_change(type_before: str, type_after: str, pg: Session, drive: Drive) -> None:
    run(pg, f"CREATE TABLE t (id int PRIMARY KEY, v {type_before})", "INSERT INTO t VALUES (1, '1')")
    driver = drive(dbtable="t")
    driver.take(1)
    run(pg, f"BEGIN; INSERT INTO t VALUES (2, '2'); ALTER TABLE t ALTER v TYPE {type_after} USING v::{type_after};"
        " INSERT INTO t VALUES (3, '333333333333333'); COMMIT")  # fmt: skip
    assert values(driver.take(2), "id", "v") == [(2, "2"), (3, "333333333333333")]
    driver.restart()
    run(pg, "INSERT INTO t VALUES (4, '4')")
    assert values(driver.take(1), "id", "v") == [(4, "4")]


@pytest.mark.parametrize(
    ("type_before", "type_after"),
    [
        ("real", "float8"),
        ("real[]", "float8[]"),
        ("float8", "numeric(20, 4)"),
        ("float8[]", "numeric[]"),
        ("bytea", "text"),
    ],
)
def test_a_type_that_project_would_read_wrong_is_another_type(
    type_before: str, type_after: str, pg: Session, drive: Drive
) -> None:
    """JSON has both in the same way, and the planned type's decoder takes the text for one of its own."""
    using = "encode(v, 'hex')" if type_after == "text" else f"v::{type_after}"
    run(pg, f"CREATE TABLE t (id int PRIMARY KEY, v {type_before})", "INSERT INTO t (id) VALUES (1)")
    driver = drive(tables="public.*")
    driver.take(1)
    run(pg, f"ALTER TABLE t ALTER v TYPE {type_after} USING {using}", "INSERT INTO t (id) VALUES (2)")
    driver.refusal("public.t: the type of column v was changed before the commit")


def test_another_scale_is_another_type(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v numeric(8, 2))", "INSERT INTO t VALUES (1, 1.25)")
    driver = drive(dbtable="t")
    driver.take(1)
    run(pg, "ALTER TABLE t ALTER v TYPE numeric(8, 3)", "INSERT INTO t VALUES (2, 2.125)")
    driver.refusal("the type of column v was changed")
    driver.restart()
    assert [str(row["v"]) for row in driver.take(1)] == ["2.125"]


def test_added_columns_may_be_ignored(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(dbtable="t", onSchemaChange="ignore")
    driver.take(1)
    run(pg, "BEGIN; INSERT INTO t VALUES (2, 20, 'b'); ALTER TABLE t ADD c int; INSERT INTO t VALUES (3, 30, 'c', 5);"
        " ALTER TABLE t ADD d int; UPDATE t SET d = 6, a = 31 WHERE id = 3; COMMIT")  # fmt: skip
    rows = driver.take(3)
    assert values(rows, "_change_type", "id", "a", "b") == [
        ("insert", 2, 20, "b"),
        ("insert", 3, 30, "c"),
        ("update", 3, 31, "c"),
    ]
    assert not {"c", "d"} & rows[0].keys()
    run(pg, "ALTER TABLE t DROP b", "INSERT INTO t VALUES (4, 40, 1, 1)")
    driver.refusal("column b was dropped or renamed")


def test_a_default_that_fills_old_rows_sends_nothing(pg: Session, drive: Drive) -> None:
    """ALTER TABLE that rewrites a table is no change of its rows for PostgreSQL."""
    run(pg, *TABLE)
    driver = drive(dbtable="t")
    driver.take(1)
    run(pg, "ALTER TABLE t ALTER b SET DEFAULT 'x', ALTER b TYPE varchar(30)", "INSERT INTO t (id) VALUES (2)")
    assert values(driver.take(1), "id", "a", "b") == [(2, None, "x")]


def test_in_the_envelope_columns_are_the_objects(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(tables="t")
    driver.take(1)
    run(pg, "BEGIN; INSERT INTO t VALUES (2, 20, 'b'); ALTER TABLE t DROP a; INSERT INTO t VALUES (3, 'c'); COMMIT")
    driver.refusal("column a was dropped or renamed", rows=1)
    driver.restart()
    driver.take(1)
    run(pg, "ALTER TABLE t ADD d int", "INSERT INTO t VALUES (4, 'd', 40)")
    driver.refusal("column d was added")
    driver.restart()
    driver.take(1)
    assert values(driver.rows, "after") == [
        ('{"id":1,"a":10,"b":"a"}',),
        ('{"id":2,"a":20,"b":"b"}',),
        ('{"id":3,"b":"c"}',),
        ('{"id":4,"b":"d","d":40}',),
    ]


def test_in_the_envelope_a_type_with_other_json_is_a_change(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(tables="t")
    driver.take(1)
    run(pg, "ALTER TABLE t ALTER a TYPE bigint", "INSERT INTO t VALUES (2, 20000000000, 'b')")
    assert values(driver.take(1), "after") == [('{"id":2,"a":20000000000,"b":"b"}',)]
    run(pg, "ALTER TABLE t ALTER a TYPE text", "INSERT INTO t VALUES (3, '30', 'c')")
    driver.refusal("the type of column a was changed")
    driver.restart()
    assert values(driver.take(1), "after") == [('{"id":3,"a":"30","b":"c"}',)]


# --- columns, while it is down ---------------------------------------------------------------------------------------


def backlog(pg: Session, driver: Driver, *statements: str) -> None:
    """Take the first row, stop, and let ``statements`` wait in the slot."""
    driver.take(1)
    driver.stop()
    run(pg, *statements)


def test_rows_from_before_a_column_was_added_list_it(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(dbtable="t")
    backlog(pg, driver, "INSERT INTO t VALUES (2, 20, 'b')", "UPDATE t SET a = 21 WHERE id = 2",
            "DELETE FROM t WHERE id = 2", "ALTER TABLE t ADD c int DEFAULT 5", "INSERT INTO t VALUES (3, 30, 'c')",
            "ALTER TABLE t ADD d int", "INSERT INTO t VALUES (4, 40, 'd', 41, 42)")  # fmt: skip
    driver.start()
    assert values(driver.take(5), "_change_type", "id", "a", "b", "c", "d", "_unchanged") == [
        ("insert", 2, 20, "b", None, None, ["c", "d"]),
        ("update", 2, 21, "b", None, None, ["c", "d"]),
        ("delete", 2, None, None, None, None, []),
        ("insert", 3, 30, "c", 5, None, ["d"]),
        ("insert", 4, 40, "d", 41, 42, []),
    ]


def test_rows_from_before_a_column_was_dropped_come_without_it(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(dbtable="t")
    backlog(pg, driver, "INSERT INTO t VALUES (2, 20, 'b')", "ALTER TABLE t DROP a", "INSERT INTO t VALUES (3, 'c')",
            "ALTER TABLE t ADD x int", "ALTER TABLE t DROP x", "INSERT INTO t VALUES (4, 'd')")  # fmt: skip
    driver.start()
    rows = driver.take(3)
    assert values(rows, "id", "b", "_unchanged") == [(2, "b", []), (3, "c", []), (4, "d", [])]
    assert "a" not in rows[0]


@pytest.mark.parametrize(
    ("ddl", "insert", "says"),
    [
        ("ALTER TABLE t RENAME a TO x", "(3, 30, 'c')", "column a was replaced or renamed to x"),
        ("ALTER TABLE t ALTER a TYPE bigint", "(3, 30, 'c')", "the type of column a was changed"),
        ("ALTER TABLE t DROP a; ALTER TABLE t ADD a text", "(3, 'c', 'x')", "the type of column a was changed"),
        (
            "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b",
            "(3, 30, 'c')",
            "the type of column ",
        ),
        ("ALTER TABLE t DROP a; ALTER TABLE t ADD c int", "(3, 'c', 1)", "column a was replaced or renamed to c"),
    ],
)
def test_rows_from_before_that_cannot_be_had_are_refused(
    ddl: str, insert: str, says: str, pg: Session, drive: Drive
) -> None:
    run(pg, *TABLE)
    driver = drive(dbtable="t")
    backlog(pg, driver, "INSERT INTO t VALUES (2, 20, 'b')", ddl, f"INSERT INTO t VALUES {insert}")
    driver.start()
    driver.refusal("public.t: ", says, "after the commit at ")
    driver.restart()
    driver.refusal(says)


def test_a_new_column_may_lack_in_rows_from_before(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(dbtable="t", onSchemaChange="ignore")
    backlog(pg, driver, "INSERT INTO t VALUES (2, 20, 'b')", "ALTER TABLE t RENAME a TO x",
            "INSERT INTO t VALUES (3, 30, 'c')")  # fmt: skip
    driver.start()
    rows = driver.take(2)
    assert values(rows, "id", "x", "b", "_unchanged") == [(2, None, "b", ["x"]), (3, 30, "c", [])]


def test_rows_from_before_an_old_type_can_be_had_as_text(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(dbtable="t")
    backlog(pg, driver, "INSERT INTO t VALUES (2, 20, 'b')", "ALTER TABLE t ALTER a TYPE numeric(6, 1)",
            "INSERT INTO t VALUES (3, 30.5, 'c')")  # fmt: skip
    driver.start()
    driver.refusal("the type of column a was changed", "asString")
    driver.restart(asString="a")
    assert values(driver.take(2), "id", "a") == [(2, "20"), (3, "30.5")]


@pytest.mark.parametrize(
    "alter",
    [
        ("ALTER TABLE t DROP {0}", "ALTER TABLE t ADD {0} int"),
        ("ALTER TABLE t RENAME a TO x", "ALTER TABLE t RENAME b TO a", "ALTER TABLE t RENAME x TO b"),
    ],
    ids=["dropped and added", "renamed"],
)
def test_a_name_that_went_to_another_column_is_a_change(alter: tuple[str, ...], pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a int, b int)", "INSERT INTO t VALUES (1, 10, 20)")
    driver = drive(dbtable="t")
    driver.take(1)
    once, again = ([statement.format(column) for statement in alter] for column in "ab")
    run(pg, "INSERT INTO t VALUES (2, 10, 20)", *once, "INSERT INTO t VALUES (3, 10, 20)")
    driver.refusal("before the commit at ", "the names a, b went to other columns", "pg-cdc resnapshot", rows=1)
    driver.restart()
    assert values(driver.take(1), "id", "a", "b") == [(3, 20, 10)]
    driver.stop()
    run(pg, "INSERT INTO t VALUES (4, 10, 20)", *again, "INSERT INTO t VALUES (5, 10, 20)")
    driver.start()
    driver.refusal("after the commit at ", "the names a, b went to other columns", "onSchemaChange=ignore", rows=None)
    driver.restart(onSchemaChange="ignore")
    assert values(driver.take(2), "id", "a", "b") == [(4, 20, 10), (5, 10, 20)]


def test_a_dataframe_that_is_older_than_the_table_is_refused(pg: Session, drive: Drive) -> None:
    run(pg, *TABLE)
    driver = drive(dbtable="t")
    run(pg, "ALTER TABLE t ADD c int")
    driver.refusal("public.t has other columns than when the DataFrame was loaded")


# --- the initial snapshot --------------------------------------------------------------------------------------------


TWO_TABLES = (*TABLE, "CREATE TABLE u (id int PRIMARY KEY, a int)", "INSERT INTO u VALUES (1, 1)")


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark takes all tables as one batch")
def test_ddl_during_the_initial_snapshot_waits_for_nobody_and_takes_no_row(pg: Session, drive: Drive) -> None:
    run(pg, *TWO_TABLES)
    driver = drive(tables="t,u")
    driver.batch()
    # Tasks that have read it let go of it half a second later; the snapshot itself is held until the next batch.
    run(pg, "SET lock_timeout = '20s'", "BEGIN; TRUNCATE t; ALTER TABLE t DROP a; COMMIT", "ALTER TABLE u ADD x text")
    driver.batch()
    assert values(driver.rows, "after") == [('{"id":1,"a":10,"b":"a"}',), ('{"id":1,"a":1}',)]
    assert kinds(driver.take(1)) == ["truncate"]
    run(pg, "INSERT INTO t VALUES (2, 'y')")
    driver.refusal("public.t: column a was dropped or renamed")


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark takes all tables as one batch")
def test_a_truncate_of_a_table_whose_batch_has_begun_is_noticed(pg: Session, drive: Drive) -> None:
    run(pg, *TWO_TABLES)
    driver = drive(tables="t,u")
    driver.batch()
    refusal_of(
        lambda: driver.attempt(planned=lambda: run(pg, "TRUNCATE u", "INSERT INTO u VALUES (2, 2)")),
        *("u was truncated or rewritten after the snapshot was taken", "again"),
        kind=SchemaChangedError,
    )
    driver.restart()
    rows = driver.take(3)
    # Its rows are gone, so it is read as it is now; the stream empties it and fills it again.
    assert values(rows, "_change_type", "after") == [
        ("snapshot", '{"id":2,"a":2}'),
        ("truncate", None),
        ("insert", '{"id":2,"a":2}'),
    ]


# --- tables and publications, while the query runs -------------------------------------------------------------------


@pytest.mark.parametrize("publication", ["FOR TABLE t", "FOR ALL TABLES"])
@pytest.mark.parametrize("again", [True, False])
def test_a_table_that_was_dropped_ends_the_stream(publication: str, again: bool, pg: Session, drive: Drive) -> None:
    run(pg, *TABLE, f"CREATE PUBLICATION s {publication}")
    driver = drive(dbtable="t")
    driver.take(1)
    driver.batch()
    run(pg, "DROP TABLE t", *(TABLE if again else ()))
    driver.refusal("public.t", "dropped", "new checkpoint")


PUBLICATION = "CREATE PUBLICATION s FOR TABLE t"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("DROP PUBLICATION s", "publication s was dropped"),
        (f"DROP PUBLICATION s; {PUBLICATION}", "publication s was dropped and created again"),
        ("ALTER PUBLICATION s DROP TABLE t", "publication s has lost public.t"),
        ("ALTER PUBLICATION s RENAME TO r", "publication s was dropped"),
    ],
)
@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_a_publication_that_stops_sending_ends_the_stream(
    change: str, says: str, down: bool, pg: Session, drive: Drive
) -> None:
    run(pg, *TABLE, "CREATE TABLE u (id int PRIMARY KEY)", "CREATE PUBLICATION s FOR TABLE t, u")
    driver = drive(dbtable="t")
    driver.take(1)
    if down:
        driver.stop()
    else:
        driver.batch()
    run(pg, *change.split("; "), "INSERT INTO t VALUES (2, 20, 'b')")
    if down:
        driver.start()
        what = "publication s does not have public.t" if "ALTER PUBLICATION s DROP" in change else "publication s "
        kind = ServerSetupError if "does not" in what or "created" not in says else SchemaChangedError
        driver.refusal(what, kind=kind)
    else:
        # Before 18, the server itself may be the first to say so. The row may come before anybody looks.
        by_server = pg.server_version < 180000 and says == "publication s was dropped"
        driver.refusal("publication " if by_server else says, kind=PgCdcError, rows=None)
        driver.restart()
        driver.refusal("publication ", kind=PgCdcError, rows=None)


def test_a_publication_cannot_be_made_for_a_slot_that_is_there(pg: Session, drive: Drive) -> None:
    """What was committed before it was made would be missing: PostgreSQL 18 passes over it with a warning."""
    run(pg, *TABLE, "SELECT pg_create_logical_replication_slot('s', 'pgoutput')", "INSERT INTO t VALUES (2, 20, 'b')")
    driver = drive(dbtable="t", startFrom="slot")
    driver.refusal("publication s does not exist", kind=ServerSetupError)
    assert run(pg, "SELECT count(*) FROM pg_publication") == [(0,)]


# --- partitions ------------------------------------------------------------------------------------------------------

# The leaves have their columns in other orders, one of them with a hole.
SALES = (
    "CREATE TABLE sales (id int, at date, amount numeric(8, 2), note text, PRIMARY KEY (id, at))"
    " PARTITION BY RANGE (at)",
    "CREATE TABLE sales_1 (note text, gone int, amount numeric(8, 2), at date NOT NULL, id int NOT NULL)",
    "ALTER TABLE sales_1 DROP gone, ADD PRIMARY KEY (id, at)",
    "ALTER TABLE sales ATTACH PARTITION sales_1 FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
    "CREATE TABLE sales_2 PARTITION OF sales FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')",
    "INSERT INTO sales VALUES (1, '2024-05-05', 1.25, 'a'), (2, '2025-05-05', 2.5, 'b')",
)
MORE_SALES = (
    "INSERT INTO sales VALUES (3, '2024-06-06', 3.75, 'c'), (4, '2025-06-06', 4.5, 'd')",
    "UPDATE sales SET amount = amount + 1 WHERE id IN (1, 2)",
    "UPDATE sales SET at = '2025-07-07' WHERE id = 3",  # moves to the other partition
    "DELETE FROM sales WHERE id = 4",
)


def sales(pg: Session) -> Sequence[str]:
    """Partitions that have another layout than their root, where a stream can have these under its name."""
    if pg.server_version >= 150000:
        return SALES
    return (
        SALES[0],
        "CREATE TABLE sales_1 PARTITION OF sales FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
        *SALES[-2:],
    )


@pytest.mark.matrix("partitioned tables", since="PostgreSQL 15", before="of one layout")
def test_partitions_come_under_their_root(pg: Session, drive: Drive) -> None:
    run(pg, *sales(pg))
    driver = drive(dbtable="sales")
    driver.take(2)
    assert values(sorted(driver.rows, key=lambda r: r["id"]), "id", "note") == [(1, "a"), (2, "b")]
    run(pg, *MORE_SALES)
    rows = driver.take(7)
    shown = [(r["_change_type"], r["id"], str(r["at"]), r["amount"] and str(r["amount"]), r["note"]) for r in rows]
    assert shown == [
        ("insert", 3, "2024-06-06", "3.75", "c"),
        ("insert", 4, "2025-06-06", "4.50", "d"),
        ("update", 1, "2024-05-05", "2.25", "a"),
        ("update", 2, "2025-05-05", "3.50", "b"),
        ("delete", 3, "2024-06-06", None, None),
        ("insert", 3, "2025-07-07", "3.75", "c"),
        ("delete", 4, "2025-06-06", None, None),
    ]


def attach(pg: Session, *, noticed: bool, as_root: bool) -> list[str]:
    """Statements that attach a table which had changes and has no rows; ``noticed`` by a server before 15 as well."""
    columns = "CREATE TABLE sales_3 (at date NOT NULL, id int NOT NULL, x int, note text, amount numeric(8, 2))"
    make = ["CREATE TABLE sales_3 (LIKE sales)"] if as_root else [columns, "ALTER TABLE sales_3 DROP x"]
    return [
        *make,
        "ALTER TABLE sales_3 ADD PRIMARY KEY (id, at)",
        "INSERT INTO sales_3 (at, id, note) VALUES ('2026-01-01', 10, 'before')",
        "DELETE FROM sales_3",
        "ALTER TABLE sales ATTACH PARTITION sales_3 FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')"
        + (ALTER if noticed else ""),
    ]


ALTER = "; ALTER PUBLICATION s SET (publish_via_partition_root = true)"


@pytest.mark.matrix("partitioned tables", since="PostgreSQL 15", before="of one layout")
def test_partitions_come_and_go(pg: Session, drive: Drive) -> None:
    run(pg, *sales(pg))
    driver = drive(dbtable="sales")
    driver.take(2)
    before_15 = pg.server_version < 150000
    run(pg, *attach(pg, noticed=before_15, as_root=before_15),
        "INSERT INTO sales VALUES (11, '2026-02-02', 11, 'attached')",
        "ALTER TABLE sales DETACH PARTITION sales_1" + ALTER * before_15,
        "INSERT INTO sales_1 (id, at) VALUES (12, '2024-01-01')",
        "INSERT INTO sales VALUES (13, '2025-02-02', 13, 'after')",
        "CREATE TABLE sales_4 PARTITION OF sales FOR VALUES FROM ('2027-01-01') TO ('2028-01-01')")  # fmt: skip
    assert values(driver.take(2), "id", "note") == [(11, "attached"), (13, "after")]
    driver.restart()
    run(pg, "INSERT INTO sales VALUES (14, '2026-02-02', 14, 'again'), (15, '2027-02-02', 15, 'created')")
    assert values(driver.take(2), "id", "note") == [(14, "again"), (15, "created")]


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("noticed", "as_root"), [(False, True), (True, False)])
def test_what_a_server_before_15_leaves_out_or_alters_is_an_error(
    pg: Session, drive: Drive, down: bool, noticed: bool, as_root: bool
) -> None:
    run(pg, *sales(pg))
    driver = drive(dbtable="sales")
    driver.take(2)
    if down:
        driver.stop()
    run(pg, *attach(pg, noticed=noticed, as_root=as_root))
    if down:
        driver.start()
    if pg.server_version < 150000:
        text = "another layout" if down and not as_root else "has a partition that was attached to public.sales"
        driver.refusal(text, kind=PgCdcError)
    elif noticed:
        # There ALTER PUBLICATION ... SET is not needed, and may mean that changes were left out for a while.
        driver.refusal("publication s was altered")
    else:
        run(pg, "INSERT INTO sales VALUES (11, '2026-02-02', 11, 'attached')")
        assert values(driver.take(1), "id", "note") == [(11, "attached")]


def test_partitions_of_another_layout_are_refused_before_15(pg: Session, drive: Drive) -> None:
    run(pg, *SALES)
    driver = drive(dbtable="sales")
    if pg.server_version < 150000:
        driver.refusal("public.sales_1", "another layout", "publish_via_partition_root = false", kind=ServerSetupError)
    else:
        driver.take(2)


def test_partitions_come_as_themselves(pg: Session, drive: Drive) -> None:
    run(pg, *SALES, "CREATE PUBLICATION s FOR TABLE sales WITH (publish_via_partition_root = false)")
    driver = drive(tables="sales")
    rows = driver.take(2)
    run(pg, *MORE_SALES)
    rows += driver.take(7)
    assert values(rows, "_table", "_change_type", "key", "after") == [
        ("public.sales_1", "snapshot", '{"at":"2024-05-05","id":1}',
         '{"note":"a","amount":"1.25","at":"2024-05-05","id":1}'),
        ("public.sales_2", "snapshot", '{"id":2,"at":"2025-05-05"}',
         '{"id":2,"at":"2025-05-05","amount":"2.50","note":"b"}'),
        ("public.sales_1", "insert", '{"at":"2024-06-06","id":3}',
         '{"note":"c","amount":"3.75","at":"2024-06-06","id":3}'),
        ("public.sales_2", "insert", '{"id":4,"at":"2025-06-06"}',
         '{"id":4,"at":"2025-06-06","amount":"4.50","note":"d"}'),
        ("public.sales_1", "update", '{"at":"2024-05-05","id":1}',
         '{"note":"a","amount":"2.25","at":"2024-05-05","id":1}'),
        ("public.sales_2", "update", '{"id":2,"at":"2025-05-05"}',
         '{"id":2,"at":"2025-05-05","amount":"3.50","note":"b"}'),
        ("public.sales_1", "delete", '{"at":"2024-06-06","id":3}', None),
        ("public.sales_2", "insert", '{"id":3,"at":"2025-07-07"}',
         '{"id":3,"at":"2025-07-07","amount":"3.75","note":"c"}'),
        ("public.sales_2", "delete", '{"id":4,"at":"2025-06-06"}', None),
    ]  # fmt: skip


def test_a_new_partition_that_comes_as_itself_is_not_passed_over(pg: Session, drive: Drive) -> None:
    run(pg, *SALES, "CREATE PUBLICATION s FOR TABLE sales WITH (publish_via_partition_root = false)")
    driver = drive(tables="sales")
    driver.take(2)
    run(pg, "CREATE TABLE sales_3 PARTITION OF sales FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
        "INSERT INTO sales VALUES (5, '2026-01-01', 5, 'e')")  # fmt: skip
    assert values(driver.take(2), "_table", "_change_type") == [
        ("public.sales_3", "truncate"), ("public.sales_3", "snapshot")
    ]  # fmt: skip


def test_the_name_that_partitions_are_published_by_cannot_change(pg: Session, drive: Drive) -> None:
    run(pg, *sales(pg))
    driver = drive(dbtable="sales")
    driver.take(2)
    driver.batch()
    run(pg, "ALTER PUBLICATION s SET (publish_via_partition_root = false)", MORE_SALES[0])
    driver.refusal("publication s ")


# --- inheritance -----------------------------------------------------------------------------------------------------


FAMILY = (
    "CREATE TABLE parent (id int PRIMARY KEY, v text)",
    "CREATE TABLE child (extra int, PRIMARY KEY (id)) INHERITS (parent)",
    "INSERT INTO parent VALUES (1, 'parent')",
    "INSERT INTO child VALUES (2, 'child', 20)",
)
OF_BOTH = (
    "UPDATE parent SET v = v || '!'",
    "INSERT INTO child VALUES (3, 'new', 30)",
    "DELETE FROM parent WHERE id > 1",
    "TRUNCATE parent",
)


def test_a_parent_is_its_own_rows_and_changes(pg: Session, drive: Drive) -> None:
    run(pg, *FAMILY)
    driver = drive(dbtable="parent", partitionBytes="8kB")
    assert values(driver.take(1), "_change_type", "id", "v") == [("snapshot", 1, "parent")]
    run(pg, *OF_BOTH)
    assert values(driver.take(2), "_change_type", "id", "v") == [("update", 1, "parent!"), ("truncate", None, None)]


@pytest.mark.parametrize(
    "publication", ["", "CREATE PUBLICATION s FOR ALL TABLES", "CREATE PUBLICATION s FOR TABLE parent"]
)
def test_a_pattern_has_each_row_once_under_its_own_table(publication: str, pg: Session, drive: Drive) -> None:
    run(pg, *FAMILY, *filter(None, [publication]))
    driver = drive(tables="public.*")
    assert sorted(values(driver.take(2), "_table", "key")) == [
        ("public.child", '{"id":2}'),
        ("public.parent", '{"id":1}'),
    ]
    run(pg, *OF_BOTH)
    rows = driver.take(7)
    assert sorted(values(rows[:2], "_table", "_change_type", "key")) == [
        ("public.child", "update", '{"id":2}'),
        ("public.parent", "update", '{"id":1}'),
    ]
    assert values(rows[2:5], "_table", "_change_type") == [
        ("public.child", "insert"),
        ("public.child", "delete"),
        ("public.child", "delete"),
    ]
    assert sorted(values(rows[5:], "_table", "_change_type")) == [
        ("public.child", "truncate"),
        ("public.parent", "truncate"),
    ]


def test_a_child_that_comes_while_the_parent_is_read_is_none_of_it(pg: Session, drive: Drive) -> None:
    if not HAS_LIMITS:
        pytest.skip("before Spark 4.2 all tables are one batch")
    run(pg, *FAMILY)
    driver = drive(tables="parent,child")
    assert values(driver.batch(), "_table") == [("public.child",)]
    run(pg, "CREATE TABLE second (PRIMARY KEY (id)) INHERITS (parent)", "INSERT INTO second VALUES (7, 'second')")
    driver.restart()
    assert values(driver.take(1), "_table", "key") == [("public.parent", '{"id":1}')]
    run(pg, "UPDATE parent SET v = 'x'")
    assert sorted(values(driver.take(2), "_table", "key")) == [
        ("public.child", '{"id":2}'),
        ("public.parent", '{"id":1}'),
    ]


# --- generated columns -----------------------------------------------------------------------------------------------


GENERATED = (
    "CREATE TABLE t (n int PRIMARY KEY, g int GENERATED ALWAYS AS (n * 2) STORED, v int)",
    "INSERT INTO t VALUES (1), (2)",
    "CREATE PUBLICATION s FOR TABLE t",
)


def test_generated_columns_that_are_not_sent_are_null_and_listed(pg: Session, drive: Drive) -> None:
    run(pg, *GENERATED)
    driver = drive(dbtable="t", beforeImage="true")
    assert values(driver.take(2), "n", "g", "_unchanged") == [(1, None, ["g"]), (2, None, ["g"])]
    run(pg, "INSERT INTO t VALUES (3)", "UPDATE t SET v = 4 WHERE n = 3", "DELETE FROM t WHERE n = 3")
    rows = driver.take(3)
    assert values(rows, "_change_type", "n", "g", "v", "_unchanged") == [
        ("insert", 3, None, None, ["g"]),
        ("update", 3, None, 4, ["g"]),
        ("delete", 3, None, None, []),
    ]
    assert rows[2]["_before"] == {"n": 3, "g": None, "v": None}


@pytest.mark.parametrize("keyed", [True, False])
def test_rows_with_generated_columns_are_turned_back(keyed: bool, pg: Session, drive: Drive) -> None:
    run(pg, *GENERATED)
    if not keyed:
        if pg.server_version >= 180000:
            pytest.skip("PostgreSQL 18 refuses FULL with a generated column that is not published")
        # Whole rows tell.
        run(pg, "ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t REPLICA IDENTITY FULL")
    run(pg, f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')", "INSERT INTO t VALUES (5)")
    if not keyed:
        run(pg, "INSERT INTO t VALUES (1)", "DELETE FROM t WHERE n = 2")
    rows = drive(dbtable="t").take(3 if keyed else 5)
    assert sorted(values(rows[:2], "_change_type", "n", "g", "_unchanged")) == [
        ("snapshot", 1, None, ["g"]),
        ("snapshot", 2, None, ["g"]),
    ]


def test_generated_columns_come_as_soon_as_they_are_published(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < 180000:
        pytest.skip("publish_generated_columns came with PostgreSQL 18")
    run(pg, *GENERATED)
    driver = drive(dbtable="t")
    driver.take(2)
    # The rows come before anybody looks at the publication.
    monkeypatch.setattr(LookPace, "is_due", lambda self: False)
    run(pg, "INSERT INTO t VALUES (3)", "ALTER PUBLICATION s SET (publish_generated_columns = stored)",
        "INSERT INTO t VALUES (4)")  # fmt: skip
    assert values(driver.take(2), "n", "g", "_unchanged") == [(3, None, ["g"]), (4, 8, [])]


def test_a_changelog_leaves_out_what_is_not_sent(pg: Session, drive: Drive) -> None:
    run(pg, *GENERATED[:2], "CREATE PUBLICATION s FOR TABLE t WITH (publish = 'insert')")
    driver = drive(dbtable="t", changeFormat="changelog")
    assert [set(row) for row in driver.take(2)] == [
        {"n", "v", "_change_type", "_commit_version", "_commit_timestamp"}
    ] * 2


# --- tables without a key --------------------------------------------------------------------------------------------


def test_no_publication_is_made_that_would_stop_updates(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (v int)", "INSERT INTO t VALUES (1)")
    driver = drive(dbtable="t")
    driver.refusal("every UPDATE and DELETE on public.t", "REPLICA IDENTITY FULL", kind=ServerSetupError)
    assert run(pg, "SELECT count(*) FROM pg_publication") == [(0,)]
    assert run(pg, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    run(pg, "UPDATE t SET v = 2")


def test_inserts_of_a_table_without_a_key_stream(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (v int)", "INSERT INTO t VALUES (1)",
        "CREATE PUBLICATION s FOR TABLE t WITH (publish = 'insert, truncate')")  # fmt: skip
    driver = drive(dbtable="t")
    driver.take(1)
    run(pg, "INSERT INTO t VALUES (1), (2)", "UPDATE t SET v = 3 WHERE v = 2", "DELETE FROM t WHERE v = 3",
        "TRUNCATE t")  # fmt: skip
    rows = driver.take(3)
    assert values(rows, "_change_type", "v") == [("insert", 1), ("insert", 2), ("truncate", None)]


MIXED = (
    "CREATE TABLE keyed (id int PRIMARY KEY, v text)",
    "CREATE TABLE log (v text)",
    "CREATE TABLE parted (v int) PARTITION BY LIST (v)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1)",
    "CREATE TABLE parted_2 PARTITION OF parted (PRIMARY KEY (v)) FOR VALUES IN (2)",
    "INSERT INTO keyed VALUES (1, 'a')",
    "INSERT INTO log VALUES ('a')",
    "INSERT INTO parted VALUES (1), (2)",
)


def test_inserts_of_tables_without_a_key_come_beside_the_changes_of_others(pg: Session, drive: Drive) -> None:
    run(pg, *MIXED)
    driver = drive(tables="public.*", keyless="insertOnly")
    driver.take(4)
    found = run(pg, "SELECT pubname, tablename FROM pg_publication_tables ORDER BY 1, 2")
    assert [row for row in found if row[1] in ("keyed", "log")] == [("s", "keyed"), ("s_inserts", "log")]
    kinds_sent = "SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = 's_inserts'"
    assert run(pg, kinds_sent) == [(True, False, False, True)]
    run(pg, "UPDATE keyed SET v = 'b'", "UPDATE log SET v = 'b'", "INSERT INTO log VALUES ('c')", "DELETE FROM log",
        "UPDATE parted SET v = 2 WHERE v = 3", "INSERT INTO parted VALUES (1)", "DELETE FROM parted WHERE v = 1",
        "TRUNCATE log", "DELETE FROM keyed")  # fmt: skip
    assert values(driver.take(5), "_change_type", "_table", "after") == [
        ("update", "public.keyed", '{"id":1,"v":"b"}'),
        ("insert", "public.log", '{"v":"c"}'),
        ("insert", "public.parted", '{"v":1}'),
        ("truncate", "public.log", None),
        ("delete", "public.keyed", None),
    ]
    driver.restart()
    run(pg, "INSERT INTO log VALUES ('d')")
    assert values(driver.take(1), "_table", "after") == [("public.log", '{"v":"d"}')]


def test_a_table_without_a_key_may_be_the_only_one(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE log (v text)", "INSERT INTO log VALUES ('a')")
    driver = drive(dbtable="log", keyless="insertOnly")
    driver.take(1)
    assert run(pg, "SELECT pubname FROM pg_publication_tables") == [("s_inserts",)]
    run(pg, "UPDATE log SET v = 'b'", "INSERT INTO log VALUES ('c')")
    assert values(driver.take(1), "_change_type", "v") == [("insert", "c")]


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        ("DROP PUBLICATION s_inserts", "publication s has lost public.log"),
        ("ALTER PUBLICATION s_inserts SET (publish = 'truncate')", "publication s_inserts is not one of inserts and"),
        ("ALTER PUBLICATION s_inserts DROP TABLE log", "publication s has lost public.log"),
    ],
)
@pytest.mark.parametrize("running", [True, False])
def test_inserts_that_are_published_no_longer_end_the_stream(
    alter: str, says: str, running: bool, pg: Session, drive: Drive
) -> None:
    run(pg, "CREATE TABLE keyed (id int PRIMARY KEY)", "CREATE TABLE log (v text)", "INSERT INTO log VALUES ('a')")
    driver = drive(tables="log,keyed", keyless="insertOnly")
    driver.take(1)
    driver.batch()
    if running:
        run(pg, alter)
        driver.refusal(says, kind=PgCdcError)
    else:
        driver.stop()
        run(pg, alter)
        driver.start()
        driver.refusal(says, kind=PgCdcError)


def test_a_second_publication_that_was_altered_for_a_while_is_noticed(pg: Session, drive: Drive) -> None:
    if pg.server_version < 150000:
        pytest.skip("before PostgreSQL 15 an ATTACH takes ALTER PUBLICATION, which so is no sign of a gap")
    run(pg, "CREATE TABLE keyed (id int PRIMARY KEY)", "CREATE TABLE log (v text)", "INSERT INTO log VALUES ('a')")
    driver = drive(tables="log,keyed", keyless="insertOnly", onNewTable="fail")
    driver.take(1)
    driver.batch()
    driver.stop()
    run(pg, "ALTER PUBLICATION s_inserts SET (publish = 'truncate')", "INSERT INTO log VALUES ('never sent')",
        "ALTER PUBLICATION s_inserts SET (publish = 'insert, truncate')")  # fmt: skip
    driver.start()
    driver.refusal("publication s has inserts of public.log in a second one, which was altered")


def test_a_second_publication_without_its_first_is_not_taken(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE log (v text)", "CREATE TABLE other (v text)", "CREATE PUBLICATION s_inserts FOR TABLE other")
    driver = drive(dbtable="log", keyless="insertOnly")
    driver.refusal("publication s_inserts exists", 'DROP PUBLICATION "s_inserts"', kind=ServerSetupError)
    assert run(pg, "SELECT count(*) FROM pg_publication") == [(1,)]


def test_without_a_key_whole_rows_tell(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (v int, w text)", "ALTER TABLE t REPLICA IDENTITY FULL", "INSERT INTO t VALUES (1, 'a')")
    driver = drive(tables="t")
    driver.take(1)
    run(pg, "UPDATE t SET v = 2", "DELETE FROM t")
    assert values(driver.take(2), "_change_type", "key", "after", "before") == [
        ("update", None, '{"v":2,"w":"a"}', '{"v":1,"w":"a"}'),
        ("delete", None, None, '{"v":2,"w":"a"}'),
    ]


# --- in Spark --------------------------------------------------------------------------------------------------------


@pytest.mark.matrix("changed columns, TOAST, collapse()")
def test_a_query_stops_at_ddl_and_goes_on_with_the_new_columns(
    spark: SparkSession, tmp_path: Path, db: str, pg: Session
) -> None:
    run(pg, *TABLE)
    with querying(spark, tmp_path, pg, db, dbtable="t") as query:
        query.start()
        query.take(1)
        run(pg, "BEGIN; INSERT INTO t VALUES (2, 20, 'b'); ALTER TABLE t ADD c int; ALTER TABLE t DROP a;"
            " INSERT INTO t VALUES (3, 'c', 31); COMMIT")  # fmt: skip
        query.refusal(
            "SchemaChangedError: [SCHEMA_CHANGED] public.t: column a was dropped or renamed before the commit at "
        )
        assert values(query.rows, "id", "a", "b") == [(1, 10, "a"), (2, 20, "b")]
        query.start()
        query.take(3)
        assert {name: query.rows[2][name] for name in ("id", "b", "c")} == {"id": 3, "b": "c", "c": 31}
        assert is_one_commit(query.rows[1:3])


@pytest.mark.matrix("changed columns, TOAST, collapse()")
@pytest.mark.usefixtures("toasted")
def test_collapse_keeps_what_did_not_travel(spark: SparkSession, tmp_path: Path, db: str, pg: Session) -> None:
    run(pg, f"INSERT INTO t SELECT 1, 0, {BIG}")
    (big,) = run(pg, "SELECT big FROM t")[0]
    with querying(spark, tmp_path, pg, db, dbtable="t") as query:
        query.each = lambda df: collapse(df, "id")
        query.start()
        query.take(1)
        run(pg, f"BEGIN; INSERT INTO t SELECT 2, 0, {BIG}; UPDATE t SET n = n + 1;"
            " UPDATE t SET id = 3 WHERE id = 2; COMMIT")  # fmt: skip
        query.take(4)
    rows = {row["id"]: row for row in query.rows[1:]}
    assert values([rows[1], rows[2], rows[3]], "_change_type", "n", "big", "_unchanged") == [
        ("update", 1, None, ["big"]),
        ("delete", None, None, []),
        ("insert", 1, big, []),
    ]


def test_options_are_refused_at_load(spark: SparkSession, db: str, pg: Session) -> None:
    run(pg, "CREATE VIEW v AS SELECT 1 AS a")
    source = PgCdcDataSource({"url": db, "slot": SLOT, "dbtable": "v"})
    driver = Driver(db, dbtable="v")
    assert source.schema().names[:1] == ["a"]
    driver.start()
    driver.refusal("public.v is a view", kind=OptionError)
    driver.stop()
