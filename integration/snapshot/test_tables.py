"""Every kind of table through snapshot and stream: what a publication leaves out, partitions, columns, names.

Streams are asked what Spark asks them, and partitions are read here, so that no test waits for a task.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg2
import pytest
from databases import connect
from driving import Drive, Driver, Row, driving, kinds, run, values
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from replica import Replica, rows_of
from rewinding import counted, source
from roles import conninfo, role
from streams import envelope
from watch import open_transactions, session_names, wait_until

from pg_cdc_source import OpenSnapshot, open_snapshot, project
from pg_cdc_source.errors import AccessError, DefiniteError, OptionError, SchemaChangedError, ServerSetupError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot import reader, reading_session
from pg_cdc_source.snapshot.handover import Handover
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import Plan, ScanRange, make_plan
from pg_cdc_source.snapshot.source import GivenSnapshot, Source, plan_ranges


@pytest.fixture
def drive(db: str, pg: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    with driving(pg, db, monkeypatch) as drive:
        yield drive


@pytest.fixture
def postgres_15(pg: Session) -> None:
    if pg.server_version < 150000:
        pytest.skip("column lists, row filters and schemas in publications came with PostgreSQL 15")


def planned(opened: OpenSnapshot, **options: str) -> tuple[Plan, Source, list[ScanRange]]:
    parsed = parse_snapshot_options({**opened.options, **options})
    plan = make_plan(parsed)
    return plan, *plan_ranges(plan, parsed)


def snapshot(db: str, **options: str) -> list[Row]:
    """What ``pgsnapshot`` reads, without Spark."""
    with open_snapshot(db) as opened:
        plan, source, ranges = planned(opened, **options)
        batches = [batch for scan_range in ranges for batch in read_range(plan, source, scan_range, "test")]
    return [row for batch in batches for row in batch.to_pylist()]


def publish(pg: Session, create: str) -> bool:
    """Create a publication of parts; False where the server is too old for that, and says so."""
    if pg.server_version >= 150000:
        run(pg, create)
        return True
    with pytest.raises(psycopg2.errors.SyntaxError):
        run(pg, create)
    return False


MARKER = "CREATE TABLE marker (id int PRIMARY KEY)"


def until_marker(pg: Session, driver: Driver, number: int) -> list[Row]:
    """Run batches until everything that was committed before has come; its rows, ``marker`` being in the stream."""
    run(pg, f"INSERT INTO marker VALUES ({number})")
    rows: list[Row] = []

    def came() -> bool:
        rows.extend(driver.batch())
        return values(rows[-1:], "after") == [(f'{{"id":{number}}}',)]

    wait_until(came)
    return rows


def apart(row: Row) -> dict[str, Any]:
    """The columns of the table."""
    return {name: value for name, value in row.items() if not name.startswith("_")}


# --- row filters ------------------------------------------------------------------------------------------------------

KEYED = "CREATE TABLE t (id int PRIMARY KEY, n int, v text)"
# Where rows lie is decided by two levels below the root; columns have other places in each leaf, and there are holes.
TREE = (
    "CREATE TABLE t (id int, n int, v text, PRIMARY KEY (id)) PARTITION BY HASH (id)",
    "CREATE TABLE t_0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0) PARTITION BY RANGE (id)",
    "CREATE TABLE t_00 (v text, gone int, n int, id int NOT NULL); ALTER TABLE t_00 DROP gone",
    "ALTER TABLE t_0 ATTACH PARTITION t_00 FOR VALUES FROM (MINVALUE) TO (50)",
    "CREATE TABLE t_01 PARTITION OF t_0 DEFAULT",
    "CREATE TABLE t_1 (n int, v text, id int NOT NULL)",
    "ALTER TABLE t ATTACH PARTITION t_1 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    "ALTER TABLE t_00 REPLICA IDENTITY FULL; ALTER TABLE t_01 REPLICA IDENTITY FULL",
    "ALTER TABLE t_1 REPLICA IDENTITY FULL; ALTER TABLE t REPLICA IDENTITY FULL",
)
# What is made, and the filter, by columns that the replica identity has: PostgreSQL refuses updates by others.
FILTERED: dict[str, tuple[tuple[str, ...], str]] = {
    "by the key": ((KEYED,), "id % 3 <> 0 AND id < 90"),
    "by any column": ((KEYED, "ALTER TABLE t REPLICA IDENTITY FULL"), "n > 40 AND v <> 'b'"),
    "by an index": (
        ("CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL, v text, UNIQUE (id, n) INCLUDE (v))",
         "ALTER TABLE t REPLICA IDENTITY USING INDEX t_id_n_v_key"),
        "n % 2 = 0",
    ),
    "of a root": (TREE, "n > 40 AND v IN ('a', 'c')"),
}  # fmt: skip
ROWS = "INSERT INTO t (id, n, v) SELECT i, i, (ARRAY['a', 'b', NULL])[1 + i % 3] FROM generate_series(1, 90) AS i"
UNDER_ROOT = "WITH (publish_via_partition_root = true)"


def random_changes(seed: int, count: int) -> Iterator[str]:
    """Transactions on ``t``: rows come, go, change, change their keys, and all of that in savepoints."""
    chance = random.Random(seed)

    def change() -> str:
        number, other, value = chance.randrange(100), chance.randrange(100), chance.choice("abc")
        return chance.choice(
            [
                f"INSERT INTO t (id, n, v) VALUES ({number}, {other}, '{value}') ON CONFLICT (id) DO NOTHING",
                f"UPDATE t SET n = {other}, v = '{value}' WHERE id = {number}",
                f"UPDATE t SET n = {other} WHERE id % 10 = {number % 10}",
                f"UPDATE t SET id = {other} WHERE id = {number}",
                f"DELETE FROM t WHERE id = {number}",
                f"SAVEPOINT s; UPDATE t SET v = '{value}', n = n + 1 WHERE id < {number}; "
                f"{chance.choice(['ROLLBACK TO', 'RELEASE'])} s",
            ]
        )

    for number in range(count):
        if number == count // 2:
            yield "TRUNCATE t; INSERT INTO t (id, n, v) SELECT i, i, 'a' FROM generate_series(1, 80) AS i"
        yield "; ".join(["BEGIN", *(change() for _ in range(chance.randrange(1, 4))), "COMMIT"])


def change_at_random(pg: Session, seed: int, count: int) -> None:
    for transaction in random_changes(seed, count):
        try:
            run(pg, transaction)
        except psycopg2.errors.UniqueViolation:
            run(pg, "ROLLBACK")


@pytest.mark.usefixtures("postgres_15")
@pytest.mark.parametrize("kind", FILTERED)
def test_a_filtered_table_is_the_rows_that_the_filter_takes(kind: str, pg: Session, drive: Drive) -> None:
    made, condition = FILTERED[kind]
    # Under a root, filters of its partitions do not count.
    beside = ", t_1 WHERE (id < 0)" if made is TREE else ""
    publication = f"CREATE PUBLICATION s FOR TABLE t WHERE ({condition}){beside}, marker {UNDER_ROOT}"
    run(pg, MARKER, *made, ROWS, publication)
    filtered = f"(SELECT * FROM t WHERE {condition}) AS filtered"
    driver, replica = drive(tables="t,marker"), Replica()
    expected = rows_of(pg, filtered)
    replica.apply(driver.take(expected.total()))
    assert replica.rows("public.t") == expected
    assert 0 < expected.total() < 90
    for seed in range(3):
        change_at_random(pg, seed, 40)
        replica.apply(until_marker(pg, driver, seed + 2))
        assert replica.rows("public.t") == rows_of(pg, filtered)
    assert {"snapshot", "insert", "update", "delete", "truncate"} == set(kinds(driver.rows))


@pytest.mark.matrix("row filters, column lists, publications of schemas", since="PostgreSQL 15")
def test_an_update_into_the_filter_is_an_insert_and_out_of_it_a_delete(pg: Session, drive: Drive) -> None:
    run(pg, KEYED, "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, i, repeat('x', 3000) FROM generate_series(9, 12) AS i")  # fmt: skip
    if not publish(pg, "CREATE PUBLICATION s FOR TABLE t WHERE (id > 10)"):
        return
    driver = drive(dbtable="t", beforeImage="true")
    assert sorted(values(driver.take(2), "id")) == [(11,), (12,)]
    run(pg, "UPDATE t SET n = 0", "UPDATE t SET id = 1 WHERE id = 11", "UPDATE t SET id = 21 WHERE id = 12",
        "UPDATE t SET id = 19 WHERE id = 9", "DELETE FROM t WHERE id = 10",
        "INSERT INTO t VALUES (2), (22)")  # fmt: skip
    rows = driver.take(7)
    assert values(rows, "_change_type", "id", "n", "_unchanged") == [
        ("update", 11, 0, ["v"]),
        ("update", 12, 0, ["v"]),
        ("delete", 11, None, []),
        ("delete", 12, None, []),
        ("insert", 21, 0, ["v"]),
        # Its value was never sent: PostgreSQL's own subscribers make it NULL.
        ("insert", 19, 0, ["v"]),
        ("insert", 22, None, []),
    ]
    assert [row["_before"] and row["_before"]["id"] for row in rows] == [None, None, 11, 12, None, None, None]


@pytest.mark.usefixtures("postgres_15")
@pytest.mark.parametrize(
    ("made", "condition"),
    [
        (KEYED, "v IS NOT NULL AND n > 10"),
        (KEYED, "(v COLLATE \"C\") > 'a' OR n IS DISTINCT FROM 3 -- %"),
        (KEYED, "length(v) = 1"),
        (
            f"""{KEYED}; ALTER TABLE t ADD "od""d %s" text DEFAULT '100%'""",
            """"od""d %s" LIKE '1%' AND id % 5 > 0""",
        ),
        (f"{KEYED}; ALTER TABLE t ADD g int GENERATED ALWAYS AS (n * 2) STORED", "g > 10"),
        (f"{KEYED}; ALTER TABLE t ADD g int GENERATED ALWAYS AS (n * 2) VIRTUAL", "g > 10"),
    ],
)
def test_any_filter_means_the_same_in_snapshot_and_stream(made: str, condition: str, pg: Session, drive: Drive) -> None:
    if "VIRTUAL" in made and pg.server_version < 180000:
        pytest.skip("virtual columns came with PostgreSQL 18")
    insert = "INSERT INTO t (id, n, v) SELECT {} + i, nullif(i, 7), (ARRAY['a', 'b', NULL])[1 + i % 3]"
    insert += " FROM generate_series(1, 20) AS i"
    with pg.cursor() as cursor:
        # Without arguments, psycopg2 leaves percent signs alone. What a decoy does, nobody calls.
        cursor.execute(f"{made}; CREATE SCHEMA decoy; CREATE FUNCTION decoy.length(text) RETURNS int LANGUAGE sql"
                       " RETURN 0")  # fmt: skip
        cursor.execute(f"CREATE PUBLICATION s FOR TABLE t WHERE ({condition}\n) WITH (publish = 'insert, truncate')")
        cursor.execute(f"SELECT count(*) FROM t WHERE {condition}")
    run(pg, insert.format(0))
    with pg.cursor() as cursor:
        cursor.execute(f"SELECT id FROM t WHERE {condition}\n")
        expected = {id_ for (id_,) in cursor}
    driver = drive(dbtable="t", options="-c search_path=decoy,public,pg_catalog")
    rows = driver.take(len(expected))
    run(pg, insert.format(100))
    assert {row["id"] for row in rows} == expected
    assert {row["id"] - 100 for row in driver.take(len(expected))} == expected
    assert 0 < len(expected) < 20


@pytest.mark.usefixtures("postgres_15")
def test_a_schema_in_the_publication_makes_a_filter_void(pg: Session, drive: Drive) -> None:
    run(pg, KEYED, "INSERT INTO t VALUES (1), (20)")
    run(pg, "CREATE PUBLICATION s FOR TABLES IN SCHEMA public, TABLE t WHERE (id > 10)")
    driver = drive(dbtable="t")
    assert len(driver.take(2)) == 2
    run(pg, "INSERT INTO t VALUES (2)")
    driver.take(1)


@pytest.mark.usefixtures("postgres_15")
@pytest.mark.parametrize("kind", ["by any column", "of a root"])
def test_a_filtered_snapshot_is_turned_back_exactly(kind: str, db: str, pg: Session, drive: Drive) -> None:
    made, condition = FILTERED[kind]
    run(pg, *made, ROWS, f"CREATE PUBLICATION rewound FOR TABLE t WHERE ({condition}) {UNDER_ROOT}")
    with source(db, dbtable="t") as first:
        end = first.next(None)
        expected = counted(first.rows(None, end))
    for seed, transactions in enumerate((1, 5, 20)):
        # Up to the TRUNCATE, which nothing turns back.
        for transaction in itertools.islice(random_changes(seed, 1000), transactions):
            try:
                run(pg, transaction)
            except psycopg2.errors.UniqueViolation:
                run(pg, "ROLLBACK")
        with source(db, dbtable="t") as again:
            assert counted(again.rows(None, end)) == expected


# --- column lists -----------------------------------------------------------------------------------------------------


@pytest.mark.matrix("row filters, column lists, publications of schemas", since="PostgreSQL 15")
@pytest.mark.parametrize("option", ["dbtable", "tables"])
def test_a_stream_has_the_columns_of_the_list(option: str, pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (secret text, v text, gone int, id int PRIMARY KEY, n int)", "ALTER TABLE t DROP gone",
        "INSERT INTO t VALUES ('s', 'a', 1), ('s', 'b', -1)")  # fmt: skip
    if not publish(pg, "CREATE PUBLICATION s FOR TABLE t (id, v) WHERE (id > 0)"):
        return
    driver = drive(**{option: "t"})
    driver.take(1)
    run(pg, "INSERT INTO t VALUES ('s', 'c', 3, 9)", "UPDATE t SET n = 1, secret = 'x', v = 'd' WHERE id = 3",
        "ALTER TABLE t ADD more int; ALTER TABLE t DROP n", "UPDATE t SET id = 4, more = 1 WHERE id = 3",
        "DELETE FROM t WHERE id = 4")  # fmt: skip
    rows = driver.take(5)
    if option == "dbtable":
        assert list(apart(rows[0])) == ["v", "id"]
        shown = values(driver.rows, "_change_type", "id", "v")
        assert shown[:3] == [("snapshot", 1, "a"), ("insert", 3, "c"), ("update", 3, "d")]
        assert shown[3:] == [("delete", 3, None), ("insert", 4, "d"), ("delete", 4, None)]
    else:
        assert values(driver.rows, "key", "after") == [
            ('{"id":1}', '{"v":"a","id":1}'),
            ('{"id":3}', '{"v":"c","id":3}'),
            ('{"id":3}', '{"v":"d","id":3}'),
            ('{"id":3}', None),
            ('{"id":4}', '{"v":"d","id":4}'),
            ('{"id":4}', None),
        ]


@pytest.mark.usefixtures("postgres_15")
def test_postgresql_refuses_changes_that_a_list_or_filter_could_not_tell(pg: Session, drive: Drive) -> None:
    """Nothing is missing in a stream then: such a change cannot be made."""
    run(pg, KEYED, "CREATE PUBLICATION s FOR TABLE t (n, v)", "INSERT INTO t VALUES (1, 1, 'a')")
    driver = drive(tables="t")
    # A part of a key would name no row.
    assert values(driver.take(1), "key", "after") == [(None, '{"n":1,"v":"a"}')]
    with pytest.raises(psycopg2.errors.InvalidColumnReference, match="cannot update table"):
        run(pg, "UPDATE t SET n = 2")
    run(pg, "INSERT INTO t VALUES (2, 2, 'b')")
    assert values(driver.take(1), "key", "after") == [(None, '{"n":2,"v":"b"}')]


@pytest.mark.usefixtures("postgres_15")
def test_an_option_that_names_a_column_outside_of_the_list_is_refused(pg: Session, db: str, drive: Drive) -> None:
    run(pg, KEYED, "CREATE PUBLICATION s FOR TABLE t (id, v)")
    with pytest.raises(OptionError, match="asString names a column that is not read: n"):
        drive(dbtable="t", asString="n")


def test_a_projected_column_that_is_not_sent_says_so(db: str, pg: Session, spark: SparkSession) -> None:
    run(pg, KEYED, "ALTER TABLE t ADD g int GENERATED ALWAYS AS (n) STORED")
    df = envelope(
        spark,
        [
            {"_table": "public.t", "_change_type": kind, **images, "_unchanged": unchanged}
            for kind, images, unchanged in (
                ("snapshot", {"after": '{"id":1,"v":null}'}, []),
                ("insert", {"after": '{"id":2,"n":2,"v":"a","g":2}'}, []),
                ("update", {"after": '{"id":2,"n":3}'}, ["v"]),
                ("delete", {"key": '{"id":2}'}, []),
                ("truncate", {}, []),
            )
        ],
    )
    rows = project(df, "t", url=db).orderBy("_seq").collect()
    assert [(row["id"], row["n"], row["v"], sorted(row["_unchanged"])) for row in rows] == [
        (1, None, None, ["g", "n"]),
        (2, 2, "a", []),
        (2, 3, None, ["g", "v"]),
        (2, None, None, []),
        (None, None, None, []),
    ]


# --- what a publication lists, and when it changes --------------------------------------------------------------------

SET = "ALTER PUBLICATION s SET TABLE u, t"
# What is done to a publication of t (id, a, v) and u, and what the stream says of it.
ALTERED = {
    "away and back": ("", "ALTER PUBLICATION s DROP TABLE t; ALTER PUBLICATION s ADD TABLE t", "public.t anew"),
    "a filter": ("", f"{SET} WHERE (id > 1)", "a row filter for public.t now"),
    "no filter": (" WHERE (id > 0)", SET, "no row filter for public.t now"),
    "another filter": (" WHERE (id > 0)", f"{SET} WHERE (id > 1)", "another row filter or column list"),
    "a list": ("", f"{SET} (id, n)", "a column list for public.t now"),
    "no list": (" (id, n)", SET, "no column list for public.t now"),
    "another list": (" (id, n)", f"{SET} (id, n, v)", "public.t anew"),
    "a lesser list": (" (id, n)", f"{SET} (id)", "public.t anew"),
    "a void filter": (
        " WHERE (id > 0)", "ALTER PUBLICATION s ADD TABLES IN SCHEMA public", "no row filter for public.t now"
    ),
}  # fmt: skip


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
@pytest.mark.parametrize("change", ALTERED)
def test_what_a_publication_leaves_out_cannot_change_unnoticed(
    change: str, down: bool, pg: Session, drive: Drive
) -> None:
    part, altered, says = ALTERED[change]
    if pg.server_version < 150000 and change != "away and back":
        pytest.skip("column lists, row filters and schemas in publications came with PostgreSQL 15")
    run(pg, KEYED, "CREATE TABLE u (id int PRIMARY KEY)", f"CREATE PUBLICATION s FOR TABLE u, t{part}",
        "INSERT INTO t VALUES (1, 1, '1')")  # fmt: skip
    driver = drive(tables="t,u", onNewTable="fail")
    driver.take(1)
    if down:
        driver.stop()
    run(pg, *altered.split("; "), "INSERT INTO t VALUES (2, 2, '2')")
    if down:
        driver.start()
    driver.refusal(says, "changes may be missing", "new checkpoint", rows=0 if down else None)
    # It stays so.
    driver.restart()
    driver.refusal(says)


def test_what_changes_nothing_for_a_table_is_let_pass(pg: Session, drive: Drive) -> None:
    part = " (id, n) WHERE (id > 0)" if pg.server_version >= 150000 else ""
    run(pg, KEYED, f"CREATE PUBLICATION s FOR TABLE t{part}", "CREATE SCHEMA x; CREATE TABLE x.u (id int PRIMARY KEY)",
        "CREATE TABLE w (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")  # fmt: skip
    driver = drive(dbtable="t")
    driver.take(1)
    harmless = [
        f"ALTER PUBLICATION s SET TABLE w, t{part}",
        f"ALTER PUBLICATION s SET TABLE t{part}",
        "ALTER TABLE t SET (fillfactor = 90); ALTER TABLE t ALTER n SET DEFAULT 1; CREATE INDEX ON t (n)",
    ]
    if part:
        # A schema and column lists do not go together.
        harmless += [f"ALTER PUBLICATION s SET TABLE t{part}, x.u"]
    for number, statement in enumerate(harmless, 2):
        if number % 2:
            driver.stop()
        run(pg, statement, f"INSERT INTO t (id) VALUES ({number})")
        if number % 2:
            driver.start()
        driver.take(1)
    # A name is not what a list or a filter holds on to.
    run(pg, "ALTER TABLE t RENAME n TO m", "INSERT INTO t (id) VALUES (100)")
    driver.refusal("column n was dropped or renamed", "same checkpoint")
    driver.restart()
    assert values(driver.take(1), "id", "m") == [(100, 1)]


@pytest.mark.matrix("row filters, column lists, publications of schemas", since="PostgreSQL 15")
def test_a_published_schema_is_a_stream_of_its_tables(pg: Session, drive: Drive) -> None:
    run(pg, 'CREATE SCHEMA "S.1"', 'CREATE TABLE "S.1".t (id int PRIMARY KEY)', 'INSERT INTO "S.1".t VALUES (1)')
    if not publish(pg, 'CREATE PUBLICATION s FOR TABLES IN SCHEMA "S.1"'):
        return
    driver = drive(tables='"S.1".*', onNewTable="changes")
    driver.take(1)
    run(pg, 'CREATE TABLE "S.1".u (id int PRIMARY KEY)', 'INSERT INTO "S.1".u VALUES (1)')
    assert values(driver.take(1), "_table", "key") == [('"S.1".u', '{"id":1}')]
    driver.stop()
    run(pg, 'ALTER PUBLICATION s DROP TABLES IN SCHEMA "S.1"', 'ALTER PUBLICATION s ADD TABLES IN SCHEMA "S.1"')
    driver.start()
    driver.refusal('publication s has "S.1".t anew')


def test_a_table_that_joined_the_stream_later_is_watched_like_the_others(pg: Session, drive: Drive) -> None:
    run(pg, KEYED, "CREATE PUBLICATION s FOR TABLE t", "INSERT INTO t VALUES (1)")
    driver = drive(tables="public.*", onNewTable="changes")
    driver.take(1)
    driver.stop()
    run(pg, "CREATE TABLE u (id int PRIMARY KEY)", "ALTER PUBLICATION s ADD TABLE u", "INSERT INTO u VALUES (1)")
    driver.start()
    driver.take(1)
    driver.stop()
    run(pg, "ALTER PUBLICATION s DROP TABLE u", "INSERT INTO u VALUES (2)", "ALTER PUBLICATION s ADD TABLE u")
    driver.start()
    driver.refusal("publication s has public.u anew")


# --- replica identity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identity", "known"),
    [
        ("DEFAULT", {"id": 1, "n": None, "v": None}),
        ("FULL", {"id": 1, "n": 1, "v": "a"}),
        ("USING INDEX t_n_key", {"id": None, "n": 1, "v": None}),
    ],
)
def test_a_delete_has_what_the_replica_identity_says(
    identity: str, known: dict[str, Any], pg: Session, drive: Drive
) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL UNIQUE, v text)",
        f"ALTER TABLE t REPLICA IDENTITY {identity}", "INSERT INTO t VALUES (1, 1, 'a'), (2, 2, 'b')")  # fmt: skip
    driver = drive(dbtable="t")
    driver.take(2)
    column = "n" if known["id"] is None else "id"
    run(pg, "DELETE FROM t WHERE id = 1", f"UPDATE t SET {column} = 3 WHERE id = 2", "UPDATE t SET v = 'c'")
    rows = driver.take(4)
    assert kinds(rows) == ["delete", "delete", "insert", "update"]
    assert apart(rows[0]) == known
    assert rows[1][column] == 2
    assert apart(rows[3]) == {**{"id": 2, "n": 2}, column: 3, "v": "c"}


def test_without_a_replica_identity_there_are_only_inserts(pg: Session, drive: Drive) -> None:
    run(pg, KEYED, "ALTER TABLE t REPLICA IDENTITY NOTHING", "INSERT INTO t VALUES (1)",
        "CREATE PUBLICATION s FOR TABLE t WITH (publish = 'insert')")  # fmt: skip
    driver = drive(tables="t")
    driver.take(1)
    run(pg, "INSERT INTO t VALUES (2)", "UPDATE t SET n = 5", "DELETE FROM t", "INSERT INTO t VALUES (3)")
    assert values(driver.take(2), "_change_type", "key") == [("insert", '{"id":2}'), ("insert", '{"id":3}')]


# --- partitions and inheritance ---------------------------------------------------------------------------------------

LIST_TREE = (
    "CREATE TABLE t (id int, n int, v text, PRIMARY KEY (id, v)) PARTITION BY LIST (v)",
    "CREATE TABLE t_a PARTITION OF t FOR VALUES IN ('a') PARTITION BY HASH (id)",
    "CREATE TABLE t_a0 (v text NOT NULL, x int, id int NOT NULL, n int); ALTER TABLE t_a0 DROP x",
    "ALTER TABLE t_a ATTACH PARTITION t_a0 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE t_a1 PARTITION OF t_a FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    "CREATE TABLE t_b PARTITION OF t FOR VALUES IN ('b', 'c') PARTITION BY RANGE (n)",
    "CREATE TABLE t_b0 PARTITION OF t_b FOR VALUES FROM (0) TO (50)",
    "CREATE TABLE t_b1 PARTITION OF t_b DEFAULT",
    "ALTER TABLE t DROP CONSTRAINT t_pkey",
)


@pytest.mark.parametrize(
    "via_root",
    [
        pytest.param(
            "true", marks=pytest.mark.matrix("partitioned tables", since="PostgreSQL 15", before="of one layout")
        ),
        pytest.param("false", marks=pytest.mark.matrix("partitioned tables")),
    ],
)
def test_trees_of_any_shape_end_as_they_are_in_postgresql(via_root: str, pg: Session, drive: Drive, db: str) -> None:
    leaves = ["t_a0", "t_a1", "t_b0", "t_b1"]
    keys = [f"ALTER TABLE {leaf} ADD PRIMARY KEY (id), REPLICA IDENTITY FULL" for leaf in leaves]
    tree = [statement.replace(", PRIMARY KEY (id, v)", "") for statement in LIST_TREE[:-1]]
    run(pg, MARKER, *tree, *keys, "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t (id, n, v) SELECT i, i, (ARRAY['a', 'b', 'c'])[1 + i % 3] FROM generate_series(1, 90) AS i",
        f"CREATE PUBLICATION s FOR TABLE t, marker WITH (publish_via_partition_root = {via_root})")  # fmt: skip
    driver, replica = drive(tables="t,marker"), Replica()
    if via_root == "true" and pg.server_version < 150000:
        driver.refusal("another layout", "t_a0", kind=ServerSetupError)
        return
    replica.apply(driver.take(90))
    names = ["t"] if via_root == "true" else leaves
    for number in range(3):
        chance = random.Random(number)
        for _ in range(60):
            value, id_, n = chance.choice("abc"), chance.randrange(100), chance.randrange(100)
            changes = [
                f"INSERT INTO t (id, n, v) VALUES ({id_}, {n}, '{value}')",
                f"UPDATE t SET v = '{value}' WHERE id = {id_}",
                f"UPDATE t SET n = {n}, id = {id_} WHERE id = {n}",
                f"DELETE FROM t WHERE id = {id_}",
            ]
            with contextlib.suppress(psycopg2.errors.UniqueViolation):
                run(pg, chance.choice(changes))
        replica.apply(until_marker(pg, driver, number))
        for name in names:
            assert replica.rows(f"public.{name}") == rows_of(pg, name)
    assert sorted(row["id"] for row in snapshot(db, dbtable="t")) == [
        id_ for (id_,) in run(pg, "SELECT id FROM t ORDER BY id")
    ]


def test_a_partition_that_comes_or_goes_brings_and_takes_no_rows(pg: Session, drive: Drive) -> None:
    """Rows of a partition are no changes when it is attached or detached: they have to be read by themselves."""
    run(pg, "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)", "INSERT INTO t VALUES (1)",
        "CREATE TABLE t_2 (id int PRIMARY KEY)", "INSERT INTO t_2 VALUES (11)")  # fmt: skip
    driver = drive(dbtable="t")
    driver.take(1)
    run(pg, "ALTER TABLE t ATTACH PARTITION t_2 FOR VALUES FROM (10) TO (20)", "ALTER TABLE t DETACH PARTITION t_1",
        "DELETE FROM t_1", "INSERT INTO t VALUES (12)", "DELETE FROM t WHERE id = 11")  # fmt: skip
    assert values(driver.take(2), "_change_type", "id") == [("insert", 12), ("delete", 11)]


@pytest.mark.parametrize("what", ["attached", "detached"])
def test_a_partition_that_comes_or_goes_before_the_snapshot_is_read_is_noticed(what: str, pg: Session, db: str) -> None:
    run(pg, "CREATE TABLE t (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)", "INSERT INTO t VALUES (1)",
        "CREATE TABLE t_2 (id int)", "INSERT INTO t_2 VALUES (11)")  # fmt: skip
    with open_snapshot(db) as before:
        plan, planned_source, ranges = planned(before, dbtable="t")
    attach = "ALTER TABLE t ATTACH PARTITION t_2 FOR VALUES FROM (10) TO (20)"
    run(pg, attach if what == "attached" else "ALTER TABLE t DETACH PARTITION t_1")
    with open_snapshot(db) as later:
        assert isinstance(planned_source, GivenSnapshot)
        source = replace(planned_source, snapshot_id=later.options["snapshot"])
        if pg.server_version < 140000:
            # One range is the whole tree, which PostgreSQL expands itself.
            rows = [row for batch in read_range(plan, source, ranges[0], "test") for row in batch.to_pylist()]
            assert [row["id"] for row in rows] == ([1, 11] if what == "attached" else [])
            return
        with pytest.raises(SchemaChangedError, match="other partitions or children"):
            list(read_range(plan, source, ranges[0], "test"))


@pytest.mark.parametrize("changed", ["t_1", "t_2"])
def test_a_session_that_goes_on_with_another_partition_looks_at_it_first(
    changed: str, pg: Session, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It waits for the next range however long that takes.
    monkeypatch.setattr(reading_session, "HANDOVER", Handover(60.0))
    run(pg, "CREATE TABLE t (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20)", "INSERT INTO t VALUES (1), (11)")  # fmt: skip
    with open_snapshot(db) as opened:
        plan, source, (first, second) = planned(opened, dbtable="t", numPartitions="2")
        assert [row["id"] for batch in read_range(plan, source, first, "test") for row in batch.to_pylist()] == [1]
        if changed == "t_1":
            with pytest.raises(psycopg2.errors.LockNotAvailable):
                # What was read stays locked as long as the session is kept.
                run(pg, "SET lock_timeout = '50ms'", "TRUNCATE t_1")
            rest = [row["id"] for batch in read_range(plan, source, second, "test") for row in batch.to_pylist()]
            assert rest == [11]
            # One at a time.
            run(pg, "TRUNCATE t_1")
            return
        run(pg, "TRUNCATE t_2")
        with pytest.raises(SchemaChangedError, match="truncated or rewritten"):
            list(read_range(plan, source, second, "test"))
    wait_until(lambda: not open_transactions(pg))


DETACH = "ALTER TABLE p DETACH PARTITION p_1"


@pytest.mark.parametrize(
    ("what", "change", "named"),
    [
        pytest.param("p", "ALTER TABLE p ATTACH PARTITION p_3 FOR VALUES FROM (20) TO (30)", "p got", id="attached"),
        pytest.param("p", DETACH, "p got", id="detached"),
        pytest.param("v", DETACH, "p got", id="detached under a view"),
        pytest.param("v", "CREATE OR REPLACE VIEW v AS SELECT id FROM p WHERE id < 12", "v got", id="view"),
        pytest.param("parent", "ALTER TABLE p_3 INHERIT parent", "parent got", id="inherits"),
        pytest.param("parent", "ALTER TABLE child NO INHERIT parent", "parent got", id="inherits no more"),
        pytest.param("called", "TRUNCATE p_3", "p_3 was truncated", id="truncated, read by a function"),
    ],
)
def test_what_postgresql_expands_by_its_present_catalog_is_not_taken_for_the_snapshots(
    what: str, change: str, named: str, pg: Session, db: str
) -> None:
    run(pg, "CREATE TABLE p (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p_2 PARTITION OF p FOR VALUES FROM (10) TO (20)", "CREATE TABLE p_3 (id int)",
        "INSERT INTO p VALUES (1), (11)", "INSERT INTO p_3 VALUES (21), (22)",
        "CREATE VIEW v AS SELECT id FROM p", "CREATE TABLE parent (id int)", "INSERT INTO parent VALUES (1)",
        "CREATE TABLE child () INHERITS (parent)", "INSERT INTO child VALUES (11)",
        "CREATE FUNCTION called() RETURNS SETOF p_3 STABLE LANGUAGE plpgsql"
        " AS 'BEGIN RETURN QUERY SELECT * FROM p_3; END'", "CREATE VIEW called AS SELECT id FROM called()")  # fmt: skip
    with role(pg, db) as login:
        # It may read no partition and no child by itself, so what it reads is read as a whole.
        run(pg, f"GRANT SELECT ON p, v, parent, called, p_3 TO {login['user']}")
        with open_snapshot(conninfo(login)) as opened:
            plan, source, [scan_range] = planned(opened, dbtable=what)
            assert not scan_range.pieces

            def ids() -> list[int]:
                return [
                    row["id"] for batch in read_range(plan, source, scan_range, "test") for row in batch.to_pylist()
                ]

            assert len(ids()) == 2
            run(pg, change)
            with pytest.raises(SchemaChangedError, match=named):
                ids()
    wait_until(lambda: not session_names(pg, "pgsnapshot:checking"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param("ALTER TABLE p ATTACH PARTITION p_3 FOR VALUES FROM (20) TO (30)", "p got", id="attached"),
        pytest.param(DETACH, "p got", id="detached"),
        pytest.param("CREATE OR REPLACE VIEW v AS SELECT id FROM p WHERE id < 12", "v got", id="view"),
    ],
)
def test_what_a_predicate_reads_is_not_taken_from_the_present_catalog(
    change: str, named: str, pg: Session, db: str
) -> None:
    run(pg, "CREATE TABLE p (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p_2 PARTITION OF p FOR VALUES FROM (10) TO (20)", "CREATE TABLE p_3 (id int)",
        "INSERT INTO p VALUES (1), (11)", "INSERT INTO p_3 VALUES (21)", "CREATE VIEW v AS SELECT id FROM p",
        "CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 30) AS i")  # fmt: skip
    if pg.server_version < 140000:
        pytest.skip("ctid ranges came with PostgreSQL 14")
    with open_snapshot(db) as opened:
        plan, source, [scan_range] = planned(opened, dbtable="t", where="id IN (SELECT id FROM v)")

        def ids() -> list[int]:
            return [row["id"] for batch in read_range(plan, source, scan_range, "test") for row in batch.to_pylist()]

        assert ids() == [1, 11]
        wait_until(lambda: not session_names(pg, "pgsnapshot:reading"))
        run(pg, change)
        with pytest.raises(SchemaChangedError, match=named):
            ids()
    wait_until(lambda: not session_names(pg, "pgsnapshot:checking"))


@pytest.mark.parametrize("where", ["id IN (SELECT id FROM parent)", "id IN (TABLE v)", "parent.id > 0"])
def test_a_predicate_that_reads_its_own_table_has_its_children_of_then(where: str, pg: Session, db: str) -> None:
    run(pg, "CREATE TABLE parent (id int)", "INSERT INTO parent VALUES (1)",
        "CREATE TABLE child () INHERITS (parent)", "INSERT INTO child VALUES (11)",
        "CREATE VIEW v AS SELECT id FROM parent")  # fmt: skip
    if pg.server_version < 140000:
        pytest.skip("ctid ranges came with PostgreSQL 14")
    with open_snapshot(db) as opened:
        plan, source, ranges = planned(opened, dbtable="parent", where=where)

        def ids() -> list[int]:
            return [
                row["id"]
                for scan_range in ranges
                for batch in read_range(plan, source, scan_range, "test")
                for row in batch.to_pylist()
            ]

        assert ids() == [1, 11]
        wait_until(lambda: not session_names(pg, "pgsnapshot:reading"))
        run(pg, "ALTER TABLE child NO INHERIT parent")
        if "(" not in where:
            # It reads no table but its own row.
            assert ids() == [1, 11]
            return
        with pytest.raises(SchemaChangedError, match="parent got"):
            ids()


SWAPPED_COLUMNS = "ALTER TABLE t RENAME b TO x; ALTER TABLE t RENAME c TO b; ALTER TABLE t RENAME x TO c"
SWAPPED_TABLES = "ALTER TABLE o RENAME TO x; ALTER TABLE p RENAME TO o; ALTER TABLE x RENAME TO p"
SWAPPED_SCHEMAS = "ALTER SCHEMA old RENAME TO x; ALTER SCHEMA new RENAME TO old"
ANOTHER_COLUMN = "ALTER TABLE t DROP b, ADD b int DEFAULT 0"
WITH_COLUMN = {"dbtable": "t", "columns": "a", "where": "b = 1"}
WITH_TABLE = {"dbtable": "t", "columns": "a", "where": "a IN (SELECT a FROM o)"}


@pytest.mark.parametrize(
    ("options", "change", "named"),
    [
        (WITH_COLUMN, SWAPPED_COLUMNS, r"public\.t\.b is public\.t\.c now"),
        (WITH_COLUMN, ANOTHER_COLUMN, r"public\.t\.b was dropped"),
        (WITH_TABLE, SWAPPED_TABLES, r"public\.p is public\.o now"),
        ({"query": "SELECT a FROM t WHERE b = 1"}, SWAPPED_COLUMNS, "is public"),
        ({"query": "SELECT a FROM t GROUP BY a HAVING sum(b) = 1"}, SWAPPED_COLUMNS, "is public"),
        ({"query": "SELECT a FROM o"}, SWAPPED_TABLES, r"public\.p is public\.o now"),
        ({"query": "SELECT a FROM old.t"}, SWAPPED_SCHEMAS, r"new\.t is old\.t now"),
    ],
)
def test_sql_reads_what_its_names_meant_in_the_snapshot(
    options: dict[str, str], change: str, named: str, pg: Session, db: str
) -> None:
    if pg.server_version < 140000:
        pytest.skip("ctid ranges came with PostgreSQL 14")
    run(pg, "CREATE TABLE t (a int, b int, c int)", "INSERT INTO t SELECT i, 1, 0 FROM generate_series(1, 9) AS i",
        "CREATE TABLE o AS SELECT a FROM t", "CREATE TABLE p (a int)", "CREATE SCHEMA old", "CREATE SCHEMA new",
        "CREATE TABLE old.t AS SELECT a FROM t", "CREATE TABLE new.t (a int)")  # fmt: skip
    with open_snapshot(db) as opened:
        plan, source, [scan_range] = planned(opened, **options)

        def rows() -> int:
            return sum(batch.num_rows for batch in read_range(plan, source, scan_range, "test"))

        assert rows() == 9
        wait_until(lambda: not session_names(pg, "pgsnapshot:reading"))
        run(pg, "ALTER TABLE t RENAME TO s", "ALTER TABLE s RENAME TO t")
        # They mean the same as in the snapshot.
        assert rows() == 9
        wait_until(lambda: not session_names(pg, "pgsnapshot:reading"))
        run(pg, change)
        with pytest.raises(SchemaChangedError, match=named):
            rows()
    # A new one has what they mean now.
    assert snapshot(db, **options) == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (WITH_COLUMN, None),
        ({"dbtable": "v"}, None),
        ({"query": "SELECT a FROM t NATURAL JOIN u"}, "d was added"),
        ({"query": "SELECT to_jsonb(t) AS t FROM t"}, "d was added"),
        (WITH_TABLE | {"where": "a IN (SELECT (to_jsonb(u) ->> 'a')::int FROM u)"}, None),
        ({"dbtable": "u", "where": "NOT EXISTS (SELECT FROM t WHERE to_jsonb(t) ? 'd')"}, "d was added"),
        ({"dbtable": "t", "columns": "a", "where": "NOT to_jsonb(t) ? 'd'"}, "d was added"),
    ],
)
def test_a_column_that_is_added_stops_sql_that_may_take_it_in(
    options: dict[str, str], what: str | None, pg: Session, db: str
) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 13 does not tell, and has no ctid ranges")
    run(pg, "CREATE TABLE t (a int, b int)", "INSERT INTO t VALUES (1, 1)", "CREATE VIEW v AS SELECT a FROM t",
        "CREATE TABLE u AS SELECT a, 2 AS d FROM t")  # fmt: skip
    with open_snapshot(db) as opened:
        plan, source, [scan_range] = planned(opened, **options)
        run(pg, "ALTER TABLE t ADD d int DEFAULT 0")
        found = read_range(plan, source, scan_range, "test")
        if what is None:
            assert sum(batch.num_rows for batch in found) == 1
        else:
            with pytest.raises(SchemaChangedError, match=what):
                list(found)


def test_an_index_that_is_made_concurrently_stops_no_reader(
    pg: Session, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statements lock all indexes of their tables, and the snapshot does not have this one."""
    if pg.server_version < 140000:
        pytest.skip("ctid ranges came with PostgreSQL 14")
    monkeypatch.setattr(reader, "BLOCKS_PER_STEP", 1)
    run(pg, "CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) AS i")
    with connect(db) as other:
        making = threading.Thread(target=run, args=(other, "CREATE INDEX CONCURRENTLY made ON t (id)"))
        with open_snapshot(db) as opened:
            plan, source, [scan_range] = planned(opened, dbtable="t", where="id > 0", numPartitions="1")
            plan = replace(plan, spec=replace(plan.spec, batch_bytes=1))
            batches = read_range(plan, source, scan_range, "test")
            found = next(batches).num_rows
            # It waits for the snapshot.
            making.start()
            wait_until(lambda: run(pg, "SELECT count(*) FROM pg_class WHERE relname = 'made'") == [(1,)])
            assert found + sum(batch.num_rows for batch in batches) == 1000
        making.join(60)
        assert not making.is_alive()


def test_a_truncate_of_one_partition_is_not_sent_under_the_root(pg: Session, drive: Drive) -> None:
    """What the README says of PostgreSQL, as it is."""
    run(pg, "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20)", "INSERT INTO t VALUES (1), (11)")  # fmt: skip
    driver = drive(dbtable="t")
    driver.take(2)
    run(pg, "TRUNCATE t_1", "INSERT INTO t VALUES (2)", "TRUNCATE t")
    assert kinds(driver.take(2)) == ["insert", "truncate"]


# --- columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["dbtable", "tables"])
def test_a_table_without_columns_streams_rows_that_are_nothing_but_changes(
    option: str, pg: Session, drive: Drive, db: str
) -> None:
    run(pg, "CREATE TABLE z ()", "ALTER TABLE z REPLICA IDENTITY FULL", "CREATE PUBLICATION s FOR TABLE z",
        *["INSERT INTO z DEFAULT VALUES"] * 2)  # fmt: skip
    driver = drive(**{option: "z"})
    driver.take(2)
    run(pg, "INSERT INTO z DEFAULT VALUES", "DELETE FROM z", "TRUNCATE z")
    rows = driver.take(5)
    assert kinds(driver.rows) == ["snapshot", "snapshot", "insert", "delete", "delete", "delete", "truncate"]
    assert apart(rows[0]) == ({} if option == "dbtable" else {"key": None, "after": "{}", "before": None})
    with pytest.raises(OptionError, match=r"public\.z has no columns to read"):
        snapshot(db, dbtable="z")
    run(pg, "INSERT INTO z DEFAULT VALUES")
    assert len(snapshot(db, dbtable="z", lsnColumn="lsn")) == 1


WIDEST = 1600


def test_as_many_columns_as_postgresql_has_are_read(pg: Session, drive: Drive, db: str) -> None:
    types = ("int", "text", "numeric(8, 2)", "bool")
    texts = ("{}", "'t{}'", "{}.25", "{} % 2 = 0")
    columns = ", ".join(f"c{i} {types[i % 4]}" for i in range(1, WIDEST))
    insert = ", ".join(texts[i % 4].format(i) for i in range(1, WIDEST))
    run(pg, f"CREATE TABLE wide (id int PRIMARY KEY, {columns})")
    with pg.cursor() as cursor:
        cursor.execute(f"INSERT INTO wide SELECT i, {insert} FROM generate_series(1, 20) AS i")
        driver = drive(dbtable="wide")
        first = driver.take(20)
        cursor.execute(f"INSERT INTO wide VALUES (21, {insert})")
    run(pg, "UPDATE wide SET c1599 = NOT c1599 WHERE id = 1")
    inserted, updated = driver.take(2)
    rows = snapshot(db, dbtable="wide")
    assert len(rows[0]) == WIDEST
    by_id = {row["id"]: apart(row) for row in (*first, inserted, updated)}
    assert by_id == {row["id"]: row for row in rows}
    assert (rows[0]["c1"], rows[0]["c2"], rows[0]["c3"]) == ("t1", rows[0]["c2"], False)


@pytest.mark.matrix("generated and identity columns")
@pytest.mark.parametrize("option", ["dbtable", "tables"])
def test_generated_and_identity_columns_are_the_same_in_snapshot_and_stream(
    option: str, pg: Session, drive: Drive, db: str
) -> None:
    virtual = ", w int GENERATED ALWAYS AS (n * 3) VIRTUAL" if pg.server_version >= 180000 else ""
    run(pg, "CREATE TABLE t (a int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, gone int,"
        " g int GENERATED ALWAYS AS (n * 2) STORED,"
        f" d int GENERATED BY DEFAULT AS IDENTITY, n int{virtual})", "ALTER TABLE t DROP gone",
        "INSERT INTO t (n) VALUES (5)")  # fmt: skip
    driver = drive(**{option: "t"})
    (snapshotted,) = driver.take(1)
    run(pg, "INSERT INTO t (n) VALUES (5)", "UPDATE t SET n = 6 WHERE a = 2")
    inserted, updated = driver.take(2)
    assert snapshot(db, dbtable="t", where="a = 1") == [
        {"a": 1, "g": 10, "d": 1, "n": 5, **({"w": 15} if virtual else {})}
    ]
    # Changes have what PostgreSQL sends, and so has the stream's snapshot.
    stored = {"g": 10} if pg.server_version >= 180000 else {}
    if option == "dbtable":
        unsent = {"w": None} if virtual else {"g": None}
        assert apart(snapshotted) == {"a": 1, "d": 1, "n": 5} | stored | unsent
        assert apart(inserted) == {"a": 2, "d": 2, "n": 5} | stored | unsent
        assert updated["g"] == (12 if stored else None)
        assert values([snapshotted, inserted, updated], "_unchanged") == [([*unsent],)] * 3
    else:
        sent = ',"g":10' if stored else ""
        assert values([snapshotted, inserted], "after") == [
            (f'{{"a":1{sent},"d":1,"n":5}}',),
            (f'{{"a":2{sent},"d":2,"n":5}}',),
        ]


@pytest.mark.parametrize("name", ["_seq", "_Change_Type", "_BEFORE", "_unchanged"])
def test_a_column_with_the_name_of_a_change_column_is_refused(name: str, pg: Session, drive: Drive) -> None:
    run(pg, f'CREATE TABLE t (id int PRIMARY KEY, "{name}" int)', "INSERT INTO t VALUES (1, 2)")
    with pytest.raises(OptionError, match=f'public.t has a column "?{name}"?, which is the name of one of the change'):
        drive(dbtable="t")
    assert values(drive(tables="t").take(1), "after") == [(f'{{"id":1,"{name}":2}}',)]


# --- names ------------------------------------------------------------------------------------------------------------


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.mark.parametrize(
    ("publication", "schema", "table", "column"),
    [
        ('Püb "1", 2; --', "a.b", 'c"d', "e.f"),
        ("it's \\ 100%s", "größe", "表 {}", "колонка 🐘"),
        ("select", "select", "from", "where"),
        ("p" * 63, "s" * 63, "t" * 63, "c" * 63),
        ("P", "pg", "ctid", "after"),
        ("a,b", "*", "*", "xmin "),
    ],
)
def test_any_name_is_streamed(
    publication: str, schema: str, table: str, column: str, pg: Session, drive: Drive
) -> None:
    where = f"{quoted(schema)}.{quoted(table)}"
    with pg.cursor() as cursor:
        # Without arguments, psycopg2 leaves percent signs alone.
        cursor.execute(f"CREATE SCHEMA {quoted(schema)}; CREATE TABLE {quoted(table)} (id int PRIMARY KEY)")
        cursor.execute(f"CREATE TABLE {where} (id int, {quoted(column)} text, PRIMARY KEY (id, {quoted(column)}))")
        cursor.execute(f"INSERT INTO {where} VALUES (1, 'a')")
        # The slot is made first and has the other table as well, which has the same name in another schema.
        tables = drive(tables=f"{where},public.{quoted(table)}", publication=publication)
        (row,) = tables.take(1)
        cursor.execute(f"UPDATE {where} SET {quoted(column)} = 'b'; INSERT INTO public.{quoted(table)} VALUES (7)")
    rows = tables.take(3)
    name = row["_table"]
    assert [row["_table"].rpartition(".")[2] for row in rows] == [name.rpartition(".")[2]] * 3
    assert values(rows, "_table", "_change_type")[:2] == [(name, "delete"), (name, "insert")]
    assert rows[2]["_table"].startswith("public.")
    tables.stop()
    typed = drive(dbtable=where, publication=publication, slot="typed", asString=quoted(column))
    assert [apart(row) for row in typed.take(1)] == [{"id": 1, column: "b"}]
    with pg.cursor() as cursor:
        cursor.execute(f"DELETE FROM {where}")
    assert [apart(row) for row in typed.take(1)] == [{"id": 1, column: "b"}]


# --- what is no table of rows -----------------------------------------------------------------------------------------


def test_snapshots_of_what_cannot_be_read_are_refused(pg: Session, db: str) -> None:
    run(pg, "CREATE TEMP TABLE tmp AS SELECT 1 AS id", "CREATE MATERIALIZED VIEW empty AS SELECT 1 AS id WITH NO DATA",
        "CREATE SEQUENCE numbers", "CREATE INDEX i ON tmp (id)", "CREATE TYPE pair AS (a int, b int)")  # fmt: skip
    (schema,) = run(pg, "SELECT pg_my_temp_schema()::regnamespace::text")[0]
    refusals: list[tuple[str, type[DefiniteError], str]] = [
        ("tmp", AccessError, "tmp does not exist"),
        (f"{schema}.tmp", ServerSetupError, "temporary tables of other sessions"),
        ("empty", DefiniteError, "has not been populated"),
        ("numbers", OptionError, "relkind S"),
        ("pair", OptionError, "relkind c"),
    ]
    for table, kind, says in refusals:
        with pytest.raises(kind, match=says):
            snapshot(db, dbtable=table)


def test_unlogged_tables_and_those_of_files_are_read(pg: Session, db: str) -> None:
    run(pg, "CREATE UNLOGGED TABLE u AS SELECT generate_series(1, 3) AS id")
    assert [row["id"] for row in snapshot(db, dbtable="u")] == [1, 2, 3]
    if not run(pg, "SELECT 1 FROM pg_available_extensions WHERE name = 'file_fdw'"):
        return
    run(pg, "CREATE EXTENSION file_fdw; CREATE SERVER files FOREIGN DATA WRAPPER file_fdw",
        "CREATE FOREIGN TABLE f (line text) SERVER files OPTIONS (program 'printf 1\\\\n2\\\\n')")  # fmt: skip
    assert [row["line"] for row in snapshot(db, dbtable="f")] == ["1", "2"]
