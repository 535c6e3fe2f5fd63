"""Tables of many small partitions: they share tasks, statements and locks, and every row is read exactly once."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg2
import pytest
import scans
from databases import Databases, connect
from driving import driving, run
from frames import load
from losses import ending_sessions
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor
from pyspark.sql import SparkSession
from roles import conninfo, role
from scans import Planned, rows_of
from watch import session_names, wait_until

from pg_cdc_source import open_snapshot
from pg_cdc_source.errors import AccessError, SchemaChangedError, TransientError, UnrepresentableError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.postgres import trees
from pg_cdc_source.postgres.connection import connect as connect_session
from pg_cdc_source.snapshot import reader, reading_session, receiving
from pg_cdc_source.snapshot.handover import Handover
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges
from pg_cdc_source.spark import pgcdc

LEAVES = 330
FEWER_LEAVES = 210  # where a test changes some, and so has its own
ROWS = 20  # of a leaf that is neither empty nor large
EMPTY = range(40, 50)
LARGE = 150
LARGE_ROWS = 6_000


@pytest.fixture(autouse=True)
def _ranges(pg: Session) -> None:
    if pg.server_version < 140000:
        pytest.skip("ctid ranges came with PostgreSQL 14")


@pytest.fixture(scope="module")
def shared(server: str, databases: Callable[[str], Databases]) -> Iterator[str]:
    """A database with ``p`` of LEAVES, for tests that change nothing in it."""
    with databases(server).one() as conninfo:
        with connect(conninfo) as session:
            make_leaves(session, LEAVES)
        yield conninfo


@pytest.fixture
def session(shared: str) -> Iterator[Session]:
    """A session in the shared database."""
    with connect(shared) as session:
        yield session


@pytest.fixture
def fewer(pg: Session) -> None:
    """``p`` of FEWER_LEAVES in the test's own database."""
    make_leaves(pg, FEWER_LEAVES)


def make_leaves(pg: Session, leaves: int) -> None:
    """``p``: partitions with columns in three orders, some empty, one large, and many small ones."""
    shapes = (
        "mood mood, id int NOT NULL, n numeric(10,2), part int NOT NULL, name text,"
        " twice int GENERATED ALWAYS AS (id * 2) STORED",
        "gone int, name text, part int NOT NULL, id int NOT NULL, twice int GENERATED ALWAYS AS (id * 2) STORED,"
        " gone_too text, n numeric(10,2), mood mood",
        "part int NOT NULL, gone int, twice int GENERATED ALWAYS AS (id * 2) STORED, n numeric(10,2), mood mood,"
        " id int NOT NULL, name text",
    )
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE TYPE mood AS ENUM ('fine', 'bad');"
            "CREATE TABLE p (id int NOT NULL, part int NOT NULL, name text, n numeric(10,2), mood mood,"
            " twice int GENERATED ALWAYS AS (id * 2) STORED) PARTITION BY LIST (part)"
        )
        for i in range(leaves):
            cursor.execute(f"CREATE TABLE p_{i} ({shapes[i % 3]})")
            if i % 3:
                cursor.execute(f"ALTER TABLE p_{i} DROP COLUMN gone, DROP COLUMN IF EXISTS gone_too")
            cursor.execute(f"ALTER TABLE p ATTACH PARTITION p_{i} FOR VALUES IN ({i})")
        cursor.execute(
            "INSERT INTO p (id, part, name, n, mood)"
            " SELECT part * 10000 + i, part, CASE WHEN i % 5 > 0 THEN 'n' || i END, i * 0.25,"
            " (ARRAY['fine', 'bad'])[1 + i % 2]::mood"
            f" FROM generate_series(0, {leaves - 1}) AS part, generate_series(1, {LARGE_ROWS}) AS i"
            f" WHERE NOT part BETWEEN {EMPTY[0]} AND {EMPTY[-1]} AND (i <= {ROWS} OR part = {LARGE})"
        )


def rows_in(leaves: int) -> int:
    return (leaves - len(EMPTY) - 1) * ROWS + LARGE_ROWS


planned = partial(scans.planned, dbtable="p")


def ids(planned: Planned) -> list[int]:
    return [row["id"] for row in rows_of(planned)]


# --- what is read ----------------------------------------------------------------------------------------------------


def test_leaves_of_any_shape_are_read_by_as_many_tasks_as_the_options_say(
    shared: str, session: Session, spark: SparkSession
) -> None:
    expected = Counter(tuple(row) for row in run(session, "SELECT id, part, name, n, mood::text, twice FROM p"))
    assert sum(expected.values()) == rows_in(LEAVES)
    [(blocks,)] = run(
        session,
        "SELECT sum(greatest(1, pg_relation_size(relid) / 8192)) FROM pg_partition_tree('p') WHERE isleaf",
    )
    by_size = -(-int(blocks) // 16)
    for cut, tasks in (
        ({}, 1),
        ({"numPartitions": 1}, 1),
        ({"numPartitions": 7}, 7),
        ({"partitionBytes": "128kB"}, by_size),
    ):
        frame = load(spark, shared, dbtable="p", **cut)
        assert frame.rdd.getNumPartitions() == tasks
        assert Counter(tuple(row) for row in frame.collect()) == expected
    filtered = load(spark, shared, dbtable="p", columns="name, id", where="id IN (SELECT max(id) FROM p GROUP BY part)")
    assert sorted(row.id for row in filtered.collect()) == [
        id for (id,) in run(session, "SELECT max(id) FROM p GROUP BY part ORDER BY 1")
    ]


def test_a_table_of_the_system_catalog_may_be_rewritten_between_two_tasks(db: str, pg: Session) -> None:
    """The files of some stand in no catalog, so nothing would tell that a range is one of another file."""
    columns = ", ".join(f"c{i} int" for i in range(1500))
    run(pg, *(f"CREATE TABLE {name} ({columns})" for name in "abcdef"), "DROP TABLE a, b, c")
    with contextlib.closing(psycopg2.connect(db)) as holder:
        holder.set_session(isolation_level="REPEATABLE READ", readonly=True)
        # It locks no catalog, as a session of this package's does by its questions.
        [(snapshot,)] = run(holder, "SELECT pg_export_snapshot()")
        parsed = parse_snapshot_options(
            {"url": db, "snapshot": snapshot, "dbtable": "pg_catalog.pg_attribute", "columns": "attrelid,attnum",
             "numPartitions": "4"}
        )  # fmt: skip
        plan = make_plan(parsed)
        source, ranges = plan_ranges(plan, parsed)
        first = rows_of((plan, source, ranges[:2]))
        run(pg, "SET lock_timeout = '20s'", "VACUUM FULL pg_catalog.pg_attribute")
        rows = first + rows_of((plan, source, ranges[2:]))
    [(expected,)] = run(pg, "SELECT count(*) FROM pg_catalog.pg_attribute")
    assert len(rows) == expected


def test_tables_that_inherit_are_not_read_one_by_one_where_timescaledb_is(db: str, pg: Session) -> None:
    """Its compressed chunks have all of their rows only where they are not asked for with ONLY."""
    run(pg, "CREATE TABLE h (id int)", "CREATE TABLE chunk () INHERITS (h)", "CREATE TABLE plain (id int)",
        *(f"INSERT INTO {table} SELECT generate_series(1, 10)" for table in ("h", "chunk", "plain")))  # fmt: skip
    with open_snapshot(db, tables=[]) as opened:
        assert all(planned(opened, dbtable=table)[2][0].pieces for table in ("h", "chunk", "plain"))
    # As far as the catalog shows it.
    run(pg, "SET allow_system_table_mods = on",
        "INSERT INTO pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)"
        " VALUES (99999, 'timescaledb', 10, 'public'::regnamespace, false, '2')")  # fmt: skip
    with open_snapshot(db, tables=[]) as opened:
        for table, rows, whole in (("h", 20, True), ("chunk", 10, True), ("plain", 10, False)):
            found = planned(opened, dbtable=table)
            assert len(ids(found)) == rows
            assert [not scan_range.pieces for scan_range in found[2]] == [whole]


# Where TimescaleDB says which chunks are compressed, before and from its 2.29 on; then how it says that one is no more.
CHUNKS = {
    "2.28": (
        "CREATE TABLE _timescaledb_catalog.chunk (schema_name name, table_name name, compressed_chunk_id int)",
        "INSERT INTO _timescaledb_catalog.chunk VALUES ('public', 'chunk', 7)",
        "UPDATE _timescaledb_catalog.chunk SET compressed_chunk_id = NULL",
    ),
    "2.29": (
        "CREATE TABLE _timescaledb_catalog.chunk (id int, relid regclass);"
        "CREATE TABLE _timescaledb_catalog.compression_settings (relid regclass, compress_relid regclass)",
        "INSERT INTO _timescaledb_catalog.compression_settings VALUES ('chunk', 'h')",
        "DELETE FROM _timescaledb_catalog.compression_settings",
    ),
}


@pytest.mark.parametrize("version", CHUNKS)
def test_a_chunk_of_timescaledb_that_was_decompressed_since_the_snapshot_is_noticed(
    version: str, db: str, pg: Session
) -> None:
    """It is empty to the snapshot. As far as the catalog shows it."""
    create, compress, decompress = CHUNKS[version]
    run(pg, "CREATE TABLE h (id int)", "CREATE TABLE chunk () INHERITS (h)", "INSERT INTO chunk VALUES (1)",
        "CREATE VIEW v AS SELECT * FROM h", "CREATE SCHEMA _timescaledb_catalog", create, compress)  # fmt: skip
    with open_snapshot(db, tables=[]) as opened:
        found = planned(opened, dbtable="v")
        assert ids(found) == [1]
        run(pg, decompress)
        with pytest.raises(SchemaChangedError, match="chunk got or lost a partition or child"):
            ids(found)


def test_a_table_of_a_method_without_exported_snapshots_is_said_to_be_of_no_point(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """As far as the catalog shows it."""
    run(pg, "CREATE ACCESS METHOD orioledb TYPE TABLE HANDLER heap_tableam_handler",
        "CREATE TABLE o USING orioledb AS SELECT 1 AS id", "CREATE TABLE plain AS SELECT 1 AS id")  # fmt: skip
    with open_snapshot(db, tables=[]) as opened:
        for table in ("o", "plain"):
            planned(opened, dbtable=table)
    assert caplog.text.count("the rows of the moment at which each session reads") == 1
    assert "public.o has the access method orioledb" in caplog.text


def test_a_distributed_table_of_citus_is_read_as_a_whole_and_said_to_be_of_no_point(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """As far as the catalog shows it."""
    run(pg, "CREATE TABLE t AS SELECT generate_series(1, 10) AS id", "CREATE TABLE plain AS SELECT 1 AS id",
        "CREATE FUNCTION citus_truncate_trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER truncate_trigger_1 AFTER TRUNCATE ON t EXECUTE FUNCTION citus_truncate_trigger()")  # fmt: skip
    with open_snapshot(db, tables=[]) as opened:
        for table, whole in (("t", True), ("plain", False)):
            assert [not scan_range.pieces for scan_range in planned(opened, dbtable=table)[2]] == [whole]
    assert caplog.text.count("is a distributed table of Citus") == 1
    assert "public.t is a distributed table of Citus" in caplog.text


def test_a_predicate_may_qualify_columns_with_the_tables_name(shared: str, session: Session) -> None:
    run(session, "CREATE TABLE flagged AS SELECT id FROM p WHERE id % 10000 = 3")
    with open_snapshot(shared) as opened:
        found = ids(planned(opened, where="EXISTS (SELECT FROM flagged WHERE flagged.id = p.id)"))
    assert sorted(found) == [id for (id,) in run(session, "SELECT id FROM flagged ORDER BY id")]


def test_a_partition_that_is_being_detached_is_left_out_as_postgresql_does(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20)", "INSERT INTO t VALUES (1), (11)")  # fmt: skip
    with connect(db) as other:
        run(other, "BEGIN", "SELECT FROM t LIMIT 0")
        # It commits that it has begun, waits for the other transaction, and gives up.
        run(pg, "SET lock_timeout = '100ms'")
        with pytest.raises(psycopg2.errors.LockNotAvailable):
            run(pg, "ALTER TABLE t DETACH PARTITION t_1 CONCURRENTLY")
    assert run(pg, "SELECT id FROM t") == [(11,)]
    with open_snapshot(db) as opened:
        assert ids(planned(opened, dbtable="t")) == [11]


def test_a_temporary_child_of_another_session_is_left_out_as_postgresql_does(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    with connect(db) as other:
        run(other, "CREATE TEMP TABLE child () INHERITS (t)", "INSERT INTO child VALUES (2)")
        assert run(pg, "SELECT id FROM t") == [(1,)]
        with open_snapshot(db, tables=["t"]) as opened:
            assert ids(planned(opened, dbtable="t")) == [1]


def test_a_foreign_partition_is_said_not_to_follow_the_snapshot(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, "CREATE FOREIGN DATA WRAPPER w", "CREATE SERVER s FOREIGN DATA WRAPPER w",
        "CREATE TABLE p (id int) PARTITION BY LIST (id)", "CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (1)",
        "CREATE FOREIGN TABLE p_2 PARTITION OF p FOR VALUES IN (2) SERVER s")  # fmt: skip
    with open_snapshot(db) as opened:
        _, _, [whole] = planned(opened)
    assert not whole.pieces
    assert caplog.text.count("public.p_2 is a foreign table") == 1


VIRTUAL = (
    "CREATE TABLE t (id int, g int GENERATED ALWAYS AS (id * 10) VIRTUAL) PARTITION BY LIST (id)",
    "CREATE TABLE t_1 PARTITION OF t (g GENERATED ALWAYS AS (id * {}) VIRTUAL) FOR VALUES IN (1)",
    "CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2)",
    "INSERT INTO t VALUES (1), (2)",
)


@pytest.fixture
def _virtual(pg: Session) -> None:
    if pg.server_version < 180000:
        pytest.skip("virtual generated columns came with PostgreSQL 18")


@pytest.mark.usefixtures("_virtual")
def test_an_expression_of_a_leafs_virtual_column_does_not_apply_through_the_root(db: str, pg: Session) -> None:
    run(pg, *(statement.format(1000) for statement in VIRTUAL))
    with open_snapshot(db) as opened:
        assert sorted(tuple(row.values()) for row in rows_of(planned(opened, dbtable="t"))) == [(1, 10), (2, 20)]
        assert sorted(ids(planned(opened, dbtable="t", columns="id", where="g < 100"))) == [1, 2]


@pytest.mark.usefixtures("_virtual")
def test_an_expression_of_a_leafs_virtual_column_that_is_changed_after_planning_is_refused(
    db: str, pg: Session
) -> None:
    run(pg, *(statement.format(10) for statement in VIRTUAL))
    with open_snapshot(db) as opened:
        plan, source, ranges = planned(opened, dbtable="t")
        assert len(rows_of((plan, source, ranges))) == len(ranges[0].pieces) == 2
    run(pg, "ALTER TABLE t_1 ALTER g SET EXPRESSION AS (id * 1000)")
    with open_snapshot(db) as opened:
        _, source, _ = planned(opened, dbtable="t")
        with pytest.raises(SchemaChangedError, match="other columns in them"):
            rows_of((plan, source, ranges))


# The leaves are read by themselves, or where one has an expression of its own as a whole.
@pytest.mark.usefixtures("_virtual")
@pytest.mark.parametrize(("factor", "pieces"), [(10, 2), (1000, 0)])
@pytest.mark.parametrize("where", [{}, {"where": "id > 0"}])
def test_an_expression_that_is_changed_after_the_snapshot_is_refused(
    factor: int, pieces: int, where: dict[str, str], db: str, pg: Session
) -> None:
    run(pg, *(statement.format(factor) for statement in VIRTUAL))
    with open_snapshot(db) as opened:
        given = planned(opened, dbtable="t", **where)
        assert len(given[2][0].pieces) == pieces
        run(pg, "ALTER TABLE t ALTER g SET EXPRESSION AS (id * 7)")
        with pytest.raises(SchemaChangedError, match="got another expression for a virtual generated column"):
            rows_of(given)


@pytest.mark.parametrize(
    "where", ["p IS NOT NULL", 'to_jsonb("p") = \'{"id": 2, "a": 2}\'', "P::text LIKE '%x%'", 'U&"\\0070" IS NOT NULL']
)
def test_a_predicate_may_have_the_row_of_a_table_whose_children_have_more_columns(
    where: str, db: str, pg: Session
) -> None:
    run(pg, "CREATE TABLE p (id int, a int)", "CREATE TABLE c (extra text) INHERITS (p)",
        "INSERT INTO p VALUES (1, 1)", "INSERT INTO c VALUES (2, 2, NULL), (3, 3, 'x')")  # fmt: skip
    expected = [id for (id,) in run(pg, f"SELECT id FROM p WHERE {where} ORDER BY 1")]
    with open_snapshot(db) as opened:
        assert sorted(ids(planned(opened, where=where))) == expected


def test_a_predicate_may_have_the_row_of_a_table_whose_leaves_have_another_order(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE p (id int, a int) PARTITION BY LIST (id)", "CREATE TABLE p_1 (a int, id int)",
        "ALTER TABLE p ATTACH PARTITION p_1 FOR VALUES IN (1)", "INSERT INTO p VALUES (1, 10)")  # fmt: skip
    with open_snapshot(db) as opened:
        assert ids(planned(opened, where="p = ROW(1, 10)::p")) == [1]


def test_a_child_that_gets_a_column_after_planning_is_refused_where_the_predicate_may_have_its_row(
    db: str, pg: Session
) -> None:
    run(pg, "CREATE TABLE p (id int)", "CREATE TABLE c () INHERITS (p)", "INSERT INTO c VALUES (1)")
    with open_snapshot(db) as opened:
        plan, _, ranges = planned(opened, where="p IS NOT NULL")
    run(pg, "ALTER TABLE c ADD extra text")
    with open_snapshot(db) as opened:
        _, source, _ = planned(opened)
        with pytest.raises(SchemaChangedError, match="other columns in them"):
            rows_of((plan, source, ranges))


def test_a_large_leaf_is_read_in_steps_of_its_own(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCKS_PER_STEP", 10)
    with open_snapshot(shared) as opened:
        found = ids(planned(opened))
    assert len(found) == len(set(found)) == rows_in(LEAVES)


def test_a_leaf_that_has_grown_after_planning_is_read_whole(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE p (id int) PARTITION BY RANGE (id)",
        *(f"CREATE TABLE p_{i} PARTITION OF p FOR VALUES FROM ({i * 10000}) TO ({(i + 1) * 10000})" for i in range(70)),
        "INSERT INTO p SELECT i * 10000 FROM generate_series(0, 69) AS i")  # fmt: skip
    with open_snapshot(db) as opened:
        plan, _, ranges = planned(opened)
        # As Spark 4.1 and later do: the ranges of the first action serve the next one.
        run(pg, "INSERT INTO p SELECT i * 10000 + j FROM generate_series(0, 69) AS i, generate_series(1, 500) AS j")
    with open_snapshot(db) as opened:
        _, source, _ = planned(opened)
        found = ids((plan, source, ranges))
    assert len(found) == len(set(found)) == 70 * 501


def test_rows_without_columns_are_counted(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE p ()", *(f"CREATE TABLE p_{i} () INHERITS (p)" for i in range(5)),
        "INSERT INTO p_1 DEFAULT VALUES", "INSERT INTO p_4 DEFAULT VALUES")  # fmt: skip
    with open_snapshot(db) as opened:
        assert len(rows_of(planned(opened, lsnColumn="lsn"))) == 2


def test_wide_leaves_are_read(db: str, pg: Session) -> None:
    columns = ", ".join(f"c{i} int" for i in range(500))
    run(pg, f"CREATE TABLE p (id int, {columns}) PARTITION BY LIST (id)",
        *(f"CREATE TABLE p_{i} PARTITION OF p FOR VALUES IN ({i})" for i in range(10)),
        "INSERT INTO p (id, c499) SELECT i, i * 2 FROM generate_series(0, 9) AS i")  # fmt: skip
    with open_snapshot(db) as opened:
        found = rows_of(planned(opened))
    assert sorted((row["id"], row["c499"]) for row in found) == [(i, i * 2) for i in range(10)]


def test_small_tables_of_a_stream_share_tasks_and_sessions(
    pg: Session, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, *(f"CREATE TABLE t_{i:02} (id int PRIMARY KEY, name text)" for i in range(40)),
        *(f"INSERT INTO t_{i:02} SELECT {i} * 10000 + j, 'n' FROM generate_series(1, {i}) AS j" for i in range(40)),
        # Some 65 blocks.
        "INSERT INTO t_20 SELECT 200000 + j, repeat('x', 100) FROM generate_series(100, 4000) AS j")  # fmt: skip
    made: list[Any] = []
    connected: list[str] = []
    partitions = pgcdc._partitions

    def partitions_seen(batch: Any) -> list[Any]:
        found = list(partitions(batch))
        made.extend(partition for partition in found if isinstance(partition, pgcdc.SnapshotPartition))
        return found

    def connecting_seen(options: Any, name: str, **more: Any) -> Session:
        connected.append(name)
        return connect_session(options, name, **more)

    monkeypatch.setattr(pgcdc, "_partitions", partitions_seen)
    monkeypatch.setattr(reading_session, "connect", connecting_seen)
    # It waits for the next range however long that takes.
    monkeypatch.setattr(reading_session, "HANDOVER", Handover(60.0))
    if pgcdc.HAS_LIMITS:
        # All tables in one batch, as with Trigger.Once; otherwise each has its own.
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        monkeypatch.setattr(pgcdc.READER, "getDefaultReadLimit", lambda self: ReadAllAvailable())
    with driving(pg, db, monkeypatch) as drive:
        rows = drive(tables="public.*", partitionBytes="256kB").batch()
    expected = {id for i in range(40) for (id,) in run(pg, f"SELECT id FROM t_{i:02}")}
    found = [json.loads(row["after"])["id"] for row in rows]
    assert len(found) == len(set(found))
    assert set(found) == expected
    # Blocks: 20 tables before the large one, whose ranges are three, and 19 after it.
    assert [len(partition.parts) for partition in made] == [20, 1, 1, 1 + 9, 10]
    assert len(connected) == 1


# --- what a leaf costs -----------------------------------------------------------------------------------------------


def test_a_range_of_many_leaves_is_small(shared: str) -> None:
    with open_snapshot(shared) as opened:
        _, _, [scan_range] = planned(opened)
    packed = pickle.dumps(scan_range)
    assert len(scan_range.pieces) == LEAVES
    assert len(packed) < 10_000
    assert pickle.loads(packed) == scan_range  # noqa: S301 - our own bytes


def test_statements_and_locks_are_for_many_leaves_at_a_time(
    shared: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []
    locked: list[int] = []
    connecting, receive = psycopg2.connect, receiving.receive

    class Counting(Cursor):  # type: ignore[misc]
        def execute(self, query: Any, vars: Any = None) -> None:
            statements.append(str(query))
            super().execute(query, vars)

    def receiving_counted(reading: Session, *arguments: Any) -> Any:
        statements.append("COPY")
        yield from receive(reading, *arguments)
        [(count,)] = run(
            session,
            "SELECT count(*) FROM pg_locks JOIN pg_class ON pg_class.oid = relation"
            f" WHERE pid = {reading.info.backend_pid} AND relname ~ '^p_[0-9]+$'",
        )
        locked.append(count)

    with open_snapshot(shared) as opened:
        plan = planned(opened)
        monkeypatch.setattr(
            psycopg2, "connect", lambda *args, **kwargs: connecting(*args, cursor_factory=Counting, **kwargs)
        )
        monkeypatch.setattr(reader, "receive", receiving_counted)
        assert len(ids(plan)) == rows_in(LEAVES)
    copies = statements.count("COPY")
    # 330 leaves, 64 at a time.
    assert copies == 6
    # Beside those of the session: release, names, lock, names again, types of the user, files, the role's search_path,
    # and the COPY.
    assert len(statements) <= 12 + 8 * copies
    assert max(locked) == 64
    assert len(locked) == copies


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize("where", [None, "id % 2 = 1"])
def test_a_value_that_spark_cannot_hold_is_named_by_its_leaf_and_ctid(where: str | None, db: str, pg: Session) -> None:
    run(pg, "DELETE FROM p_207 WHERE id = 2070003", "UPDATE p SET n = 'NaN' WHERE id = 2070007")
    [(ctid,)] = run(pg, "SELECT ctid::text FROM p WHERE id = 2070007")
    with open_snapshot(db) as opened:
        given = planned(opened, **({"where": where} if where else {}))
        with pytest.raises(UnrepresentableError) as refused:
            rows_of(given)
    assert refused.value.what == f"public.p_207, column n (numeric(10,2)), ctid {ctid}: NaN"


@pytest.mark.parametrize("leaves", [1, 2])
def test_a_value_that_a_volatile_predicate_has_chosen_has_no_wrong_place(leaves: int, db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE p (id int, d date) PARTITION BY HASH (id)",
        *(f"CREATE TABLE p_{i} PARTITION OF p FOR VALUES WITH (modulus {leaves}, remainder {i})"
          for i in range(leaves)),
        "INSERT INTO p SELECT i, CASE WHEN i > 150 THEN 'infinity' ELSE now() END FROM generate_series(1, 200) AS i"
    )  # fmt: skip
    right = {f"public.p_{i}, column d (date), ctid {ctid}: infinity" for i in range(leaves)
             for (ctid,) in run(pg, f"SELECT ctid::text FROM p_{i} WHERE d = 'infinity'")}  # fmt: skip
    right.add("public.p_0, column d (date), blocks [0, end): infinity")
    right.add("public.p, column d (date), one of 2 tables from public.p_0 to public.p_1: infinity")
    with open_snapshot(db) as opened:
        given = planned(opened, where="random() < 0.5")
        for _ in range(10):
            with pytest.raises(UnrepresentableError) as refused:
                rows_of(given)
            assert refused.value.what in right


def test_a_session_that_is_lost_among_leaves_repeats_no_row_and_misses_none(
    shared: str, session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Chunks of 30 rows, so that rows of a statement are handed on before it ends. Buffers have room for all of them,
    # so what is lost with a session is what was not taken out.
    monkeypatch.setattr(receiving, "ROWS_PER_CHUNK", 30)
    received, numbers = receiving.receive, itertools.count()

    def receive_until_lost(*arguments: Any) -> Iterator[receiving.Decoded]:
        for chunk in received(*arguments):
            yield chunk
            if next(numbers) in (5, 30, 90):
                run(session, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'pgsnapshot:reading'")  # fmt: skip
                raise TransientError("the session is lost")

    monkeypatch.setattr(reader, "receive", receive_until_lost)
    with open_snapshot(shared) as opened:
        found = ids(planned(opened))
    assert caplog.text.count("connecting again") == 3
    assert Counter(found) == Counter(id for (id,) in run(session, "SELECT id FROM p"))


def test_sessions_that_are_lost_again_and_again_in_spark(shared: str, session: Session, spark: SparkSession) -> None:
    frame = load(spark, shared, dbtable="p", numPartitions=3, where="id % 10000 <> 1 OR pg_sleep(0.01) IS NOT NULL")
    # Seldom enough that a statement, begun again, comes to its end in between.
    with ending_sessions(shared, "pgsnapshot:%?%", 1.2, "state = 'active' AND query LIKE 'COPY%%'") as ended:
        for _ in range(10):
            found = Counter(row.id for row in frame.select("id").collect())
            assert found == Counter(id for (id,) in run(session, "SELECT id FROM p"))
            if ended:
                break
    assert ended


RELOAD = "was dropped, renamed or replaced after the DataFrame was loaded"
SWAP = (
    "ALTER TABLE p DETACH PARTITION p_200; ALTER TABLE p_200 RENAME name TO x; ALTER TABLE p_200 ADD name text;"
    " ALTER TABLE p_200 DROP x; ALTER TABLE p ATTACH PARTITION p_200 FOR VALUES IN (200)"
)
CHANGES = {
    "truncated": ("TRUNCATE p_200", "p_200 was truncated or rewritten after the snapshot was taken"),
    "rewritten": ("VACUUM FULL p_200", "p_200 was truncated or rewritten after the snapshot was taken"),
    "dropped": ("DROP TABLE p_200", f"public.p_200 {RELOAD}"),
    "renamed": ("ALTER TABLE p_200 RENAME TO other", f"public.p_200 {RELOAD}"),
    "created again": ("DROP TABLE p_200; CREATE TABLE p_200 PARTITION OF p FOR VALUES IN (200)", RELOAD),
    "column replaced": (
        SWAP,
        "reading public.p_200: column name was dropped, renamed or replaced after the DataFrame was loaded",
    ),
    "all truncated": ("TRUNCATE p", "was truncated or rewritten after the snapshot was taken"),
    "column retyped": ("ALTER TABLE p ALTER name TYPE varchar", "column name (text) is not the column it was"),
    "column dropped": ("ALTER TABLE p DROP name", "column p_0.name does not exist"),
}


@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize("change", CHANGES)
def test_a_leaf_changed_between_plan_and_read_is_refused(change: str, db: str, pg: Session) -> None:
    statements, expected = CHANGES[change]
    with open_snapshot(db) as opened:
        given = planned(opened)
        for statement in statements.split("; "):
            run(pg, statement)
        with pytest.raises(SchemaChangedError) as refused:
            rows_of(given)
    assert expected in refused.value.what


@pytest.mark.usefixtures("fewer")
def test_a_leaf_that_is_detached_after_the_snapshot_is_read(db: str, pg: Session) -> None:
    with open_snapshot(db) as opened:
        given = planned(opened)
        run(pg, "ALTER TABLE p DETACH PARTITION p_200", "DELETE FROM p_200", "UPDATE p_201 SET name = 'later'")
        found = rows_of(given)
    assert len(found) == rows_in(FEWER_LEAVES)
    assert "later" not in {row["name"] for row in found}


@pytest.mark.usefixtures("fewer")
def test_a_right_that_is_taken_away_names_the_leaf(db: str, pg: Session) -> None:
    with role(pg, db) as login:
        names = ", ".join(["p", *(f"p_{i}" for i in range(FEWER_LEAVES))])
        run(pg, f"GRANT SELECT ON {names} TO {login['user']}")
        with open_snapshot(conninfo(login), consistentPoint="off") as opened:
            given = planned(opened)
            assert len(given[2][0].pieces) == FEWER_LEAVES
            run(pg, f"REVOKE SELECT ON p_200 FROM {login['user']}")
            with pytest.raises(AccessError, match="p_200"):
                rows_of(given)


# --- locks -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locking(db: str, table: str) -> Iterator[None]:
    with connect(db) as session, session.cursor() as cursor:
        cursor.execute(f"BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield
        cursor.execute("ROLLBACK")


@pytest.mark.usefixtures("fewer")
def test_an_open_snapshot_locks_every_leaf(db: str, pg: Session) -> None:
    run(pg, "SET lock_timeout = '50ms'")
    with role(pg, db) as login:
        # The right to some columns is not enough for LOCK TABLE.
        run(pg, f"GRANT SELECT (id) ON p TO {login['user']}")
        for url in (db, conninfo(login)):
            with open_snapshot(url, tables=["p"], consistentPoint="off"):
                for leaf in ("p_0", f"p_{FEWER_LEAVES - 1}"):
                    with pytest.raises(psycopg2.errors.LockNotAvailable):
                        run(pg, f"TRUNCATE {leaf}")
            run(pg, "TRUNCATE p_0")


def test_a_reader_that_waits_for_a_leaf_holds_no_other_leaf(
    shared: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    waited = threading.Event()
    open_session = reading_session.ReadingSession.open

    def opening(self: Any, pieces: Any) -> Session:
        waited.set()
        return open_session(self, pieces)

    with open_snapshot(shared) as opened:
        given = planned(opened)
        monkeypatch.setattr(reading_session.ReadingSession, "open", opening)
        # pg_relation_size() waits as well, with nothing locked.
        monkeypatch.setattr(trees, "read_blocks", lambda *arguments: {})
        reading = threading.Thread(target=lambda: found.extend(ids(given)))
        with locking(shared, "p_30"):
            reading.start()
            assert waited.wait(60)
            for _ in range(20):
                for other in ("p_0", "p_29", "p_31"):
                    # Longer than a try to lock all takes, and shorter than the reader waits.
                    run(session, "BEGIN", "SET LOCAL lock_timeout = '2s'",
                        f"LOCK TABLE {other} IN ACCESS EXCLUSIVE MODE", "ROLLBACK")  # fmt: skip
            assert session_names(session, "pgsnapshot:reading")
            assert not found
        reading.join(60)
    assert len(found) == rows_in(LEAVES)
    wait_until(lambda: not session_names(session, "pgsnapshot:reading"))
