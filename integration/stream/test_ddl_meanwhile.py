"""DDL between two queries of one look at the catalog: the stream goes on, or a restart with its checkpoint does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import pytest
from corners import cases
from databases import connect
from driving import Drive, Driver, Row, drop_slots, run, values
from psycopg2.extensions import connection as Session
from replica import Replica, rows_of
from roles import conninfo, role
from threads import at_work
from watch import wait_until

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.postgres.publication import sent
from pg_cdc_source.snapshot import scan
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream.tables import published_tables

TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "CREATE TABLE u (id int PRIMARY KEY, v text)",
    "INSERT INTO t VALUES (1, 'a')",
)
PUBLICATION = "CREATE PUBLICATION s FOR TABLE t, u"
DDL = {
    "dropped": "DROP TABLE u",
    "renamed": "ALTER TABLE u RENAME TO w",
    "moved": "CREATE SCHEMA other; ALTER TABLE u SET SCHEMA other",
    "less": "ALTER TABLE u DROP COLUMN v",
}
# What runs the queries of a look: between those of the publication and of its tables, and between those of one table.
QUERIES: list[tuple[ModuleType, str]] = [
    (published_tables, "plan_stream"),
    (sent, "_unpublished_columns"),
    (scan, "plan_in"),
]
JustBefore = Callable[[str], list[str]]


@pytest.fixture(params=QUERIES, ids=lambda query: f"{query[0].__name__.rpartition('.')[2]}.{query[1]}")
def just_before(pg: Session, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> JustBefore:
    """``just_before(statement)``: the next look runs the statement in between. What was run is in the list."""
    module, name = request.param
    real = getattr(module, name)

    def inject(statement: str) -> list[str]:
        done: list[str] = []

        def first(*args: object, **named: object) -> object:
            if not done:
                done.append(statement)
                run(pg, statement)
            return real(*args, **named)

        monkeypatch.setattr(module, name, first)
        return done

    return inject


def goes_on(driver: Driver, count: int) -> list[Row]:
    """Start, and again where that is said to help, until so many rows have come."""
    for _ in range(3):
        try:
            driver.restart()
            return driver.take(count)
        except SchemaChangedError:
            pass
    raise AssertionError("it does not go on")


@pytest.mark.parametrize("what", cases(DDL, "dropped", "less"))
def test_while_a_query_starts_again(what: str, pg: Session, drive: Drive, just_before: JustBefore) -> None:
    run(pg, *TABLES, PUBLICATION)
    driver = drive(tables="public.*", onSchemaChange="ignore")
    driver.take(1)
    driver.stop()
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    done = just_before(DDL[what])
    assert values(goes_on(driver, 1), "_table") == [("public.t",)]
    assert done == [DDL[what]]


@pytest.mark.parametrize("what", cases(DDL, "dropped", "less"))
def test_while_a_table_joins(what: str, pg: Session, drive: Drive, just_before: JustBefore) -> None:
    run(pg, *TABLES, PUBLICATION)
    driver = drive(tables="public.*", onSchemaChange="ignore")
    driver.take(1)
    run(pg, "CREATE TABLE n (id int PRIMARY KEY)", "INSERT INTO n VALUES (1)", "ALTER PUBLICATION s ADD TABLE n")
    done = just_before(DDL[what])
    assert values(driver.take(2), "_table", "_change_type") == [("public.n", "truncate"), ("public.n", "snapshot")]
    assert done == [DDL[what]]


def test_while_the_publication_is_read(pg: Session, db: str, drive: Drive) -> None:
    """PostgreSQL lists its tables first, and then opens each of them. 18.6 passes over one that is gone."""
    if pg.server_version < 160000:
        pytest.skip("no table is opened before PostgreSQL 16")
    run(pg, *TABLES, PUBLICATION)
    driver = drive(tables="public.*", onSchemaChange="ignore")
    driver.take(1)
    run(pg, "BEGIN", "DROP TABLE u")

    def commit(stop: threading.Event) -> None:
        waits = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pgcdc:s:source' AND wait_event_type = 'Lock'"
        with connect(db) as other:
            wait_until(lambda: stop.is_set() or run(other, waits))
        run(pg, "COMMIT")

    with at_work(commit):
        wait_until(lambda: (driver.batch(), [member.name for member in driver.members] == ["public.t"])[1])
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    assert values(driver.take(1), "_table") == [("public.t",)]


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark reads all tables in the first batch")
@pytest.mark.parametrize(
    "meanwhile",
    [
        "TRUNCATE u",
        "TRUNCATE w",
        "VACUUM FULL u",
        "CREATE TABLE w3 PARTITION OF w FOR VALUES FROM (20) TO (30); INSERT INTO w VALUES (20, 'x')",
        "DROP TABLE w2",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgcdc:s:snapshot'",
    ],
    ids=lambda statement: " ".join(statement.split()[:2]),
)
def test_between_the_batches_of_the_initial_snapshot(meanwhile: str, pg: Session, drive: Drive) -> None:
    run(pg, *TABLES, "INSERT INTO u VALUES (1, 'a'), (2, 'b')",
        "CREATE TABLE w (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE w1 PARTITION OF w FOR VALUES FROM (1) TO (10)",
        "CREATE TABLE w2 PARTITION OF w FOR VALUES FROM (10) TO (20)", "INSERT INTO w VALUES (1, 'a'), (2, 'b')",
        "CREATE PUBLICATION s FOR TABLE t, u, w WITH (publish_via_partition_root)")  # fmt: skip
    driver = drive(tables="public.*")
    wait_until(driver.batch)
    assert (driver.offset.tables, driver.offset.done) == (("public.t", "public.u", "public.w"), 1)
    replica = Replica()
    replica.apply(driver.rows)
    run(pg, meanwhile, "UPDATE t SET v = 'c'")
    [(through,)] = run(pg, "SELECT (pg_current_wal_lsn() - '0/0')::bigint")

    def is_whole() -> bool:
        replica.apply(driver.batch(), through)
        return all(replica.rows(f"public.{table}") == rows_of(pg, table) for table in "tuw")

    wait_until(is_whole)


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark reads all tables in the first batch")
@pytest.mark.parametrize(
    "meanwhile", ["ALTER TABLE u RENAME TO x", "ALTER PUBLICATION s DROP TABLE u", "ALTER TABLE u RENAME v TO w"]
)
def test_a_table_that_is_named_is_read_whatever_has_become_of_its_name(
    meanwhile: str, pg: Session, drive: Drive
) -> None:
    run(pg, *TABLES, "INSERT INTO u VALUES (1, 'a'), (2, 'b')", PUBLICATION)
    driver = drive(tables="public.t, public.u", onSchemaChange="emit")
    wait_until(driver.batch)
    run(pg, meanwhile)
    rows = driver.batch()
    assert [row["after"] for row in rows if row["_change_type"] == "snapshot"] == [
        '{"id":1,"v":"a"}',
        '{"id":2,"v":"b"}',
    ]


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark reads all tables in the first batch")
def test_what_becomes_of_a_table_that_inherits_does_not_matter(
    pg: Session, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, *TABLES, "INSERT INTO u VALUES (1, 'a'), (2, 'b')", "CREATE TABLE z () INHERITS (u)",
        "CREATE PUBLICATION s FOR TABLE ONLY t, ONLY u")  # fmt: skip
    driver = drive(tables="public.t, public.u")
    wait_until(driver.batch)
    # Without FULL, the table could not be turned back.
    run(pg, "UPDATE u SET v = 'later' WHERE id = 1", "DELETE FROM u WHERE id = 2", "TRUNCATE z")
    assert values(driver.batch(), "after") == [('{"id":1,"v":"a"}',), ('{"id":2,"v":"b"}',)]
    assert "turned back" not in caplog.text


@pytest.mark.usefixtures("drive")
def test_a_tree_may_have_tables_in_schemas_that_the_role_may_not_use(pg: Session, db: str) -> None:
    run(pg, "CREATE SCHEMA parts", "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "CREATE TABLE w (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE parts.w1 PARTITION OF w DEFAULT", "CREATE TEMP TABLE u1 () INHERITS (u)",
        "INSERT INTO u VALUES (1, 'a')", "INSERT INTO w VALUES (1, 'a')",
        "CREATE PUBLICATION s FOR TABLE w, ONLY u WITH (publish_via_partition_root)")  # fmt: skip
    with role(pg, db, "REPLICATION") as login:
        run(pg, f"GRANT SELECT ON w, u TO {login['user']}")
        driver = Driver(conninfo(login), tables="public.u, public.w", publicationMode="require").start()
        try:
            assert values(driver.take(2), "_table") == [("public.u",), ("public.w",)]
        finally:
            driver.stop()
            drop_slots(pg)
