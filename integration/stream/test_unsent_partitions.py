"""Partitions that write nothing to the WAL, or are published under no name, while the publication stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import psycopg2.errors
import pytest
from databases import connect
from driving import Driver, driving, kinds, run, values
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.errors import OptionError, ServerSetupError
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.postgres.publication import read_publication
from pg_cdc_source.stream.tables import publication_watch
from pg_cdc_source.stream.tables.refused_tables import require_complete

Drive = Callable[..., Driver]
ROOT = (
    "CREATE TABLE r (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE r_1 PARTITION OF r FOR VALUES FROM (0) TO (10)",
    "INSERT INTO r VALUES (1, 'a')",
)
BY_ROOT = "CREATE PUBLICATION s FOR TABLE r WITH (publish_via_partition_root)"
UNSENT = {
    "created unlogged": ("CREATE UNLOGGED TABLE q PARTITION OF r FOR VALUES FROM (10) TO (20)", "q", "unlogged"),
    "made unlogged": ("ALTER TABLE r_1 SET UNLOGGED", "r_1", "unlogged"),
    "created foreign": (
        "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER f FOREIGN DATA WRAPPER w;"
        "CREATE FOREIGN TABLE q PARTITION OF r FOR VALUES FROM (10) TO (20) SERVER f",
        "q",
        "a foreign table",
    ),
}


@pytest.fixture
def drive(pg: Session, db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    with driving(pg, db, monkeypatch) as drive:
        yield drive


def begun(drive: Drive, *, rows: int, **options: str) -> Driver:
    """A stream that has read the root and has looked at the publication since."""
    driver = drive(**options)
    wait_until(lambda: driver.batch() is not None and kinds(driver.rows).count("snapshot") == rows)
    assert driver.batch() == []
    driver.rows.clear()
    return driver


@pytest.mark.parametrize("what", UNSENT)
def test_a_root_with_a_partition_that_sends_nothing_ends_the_stream(what: str, pg: Session, drive: Drive) -> None:
    statement, partition, kind = UNSENT[what]
    run(pg, *ROOT, BY_ROOT)
    if "FOREIGN" in statement:
        run(
            pg,
            "ALTER TABLE r DROP CONSTRAINT r_pkey",
            *(f"ALTER TABLE {t} REPLICA IDENTITY FULL" for t in ("r", "r_1")),
        )
    driver = begun(drive, rows=1, tables="public.*")
    run(pg, statement)
    driver.refusal(f"public.{partition}, a partition of public.r, is {kind}", kind=OptionError)


@pytest.mark.parametrize("tables", ["public.*", "public.r, public.t"])
def test_a_root_with_a_partition_that_sends_nothing_leaves_a_stream_that_says_so(
    tables: str, pg: Session, drive: Drive
) -> None:
    run(pg, *ROOT, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (0)",
        BY_ROOT.replace("TABLE r", "TABLE r, t"))  # fmt: skip
    driver = begun(drive, rows=2, tables=tables, onSchemaChange="emit", onNewTable="snapshot")
    run(pg, "ALTER TABLE r_1 SET UNLOGGED")
    wait_until(lambda: driver.batch() is not None and "is unlogged" in str(values(driver.rows, "after")))
    # It stays out over a start, and the others go on.
    driver.restart()
    run(pg, "INSERT INTO r VALUES (2, 'unseen')", "INSERT INTO t VALUES (1)")
    wait_until(lambda: driver.batch() is not None and "insert" in kinds(driver.rows))
    assert values([row for row in driver.rows if row["_change_type"] == "insert"], "_table") == [("public.t",)]
    run(pg, "ALTER TABLE r_1 SET LOGGED")
    wait_until(lambda: driver.batch() is not None and kinds(driver.rows).count("snapshot") == 2)


def test_a_new_partition_that_is_not_published_ends_a_stream_that_names_the_root(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_watch, "_UNPUBLISHED_SECONDS", 1.0)
    run(pg, *ROOT, "CREATE PUBLICATION s FOR TABLE r_1")
    driver = begun(drive, rows=1, tables="public.r")
    # It may be published a moment later.
    run(pg, "CREATE TABLE p PARTITION OF r FOR VALUES FROM (20) TO (30)")
    assert driver.batch() == []
    run(pg, "ALTER PUBLICATION s ADD TABLE p", "INSERT INTO r VALUES (21, 'b')")
    wait_until(lambda: driver.batch() is not None and ("public.p",) in values(driver.rows, "_table"))
    run(pg, "CREATE TABLE q PARTITION OF r FOR VALUES FROM (10) TO (20)", "INSERT INTO r VALUES (11, 'unseen')")
    driver.refusal("has some partitions of public.r, but not public.q", kind=ServerSetupError, rows=None)


def test_a_partition_that_is_being_detached_is_not_one_that_was_attached(pg: Session, db: str, drive: Drive) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 detaches partitions concurrently")
    run(pg, "CREATE TABLE p (id int PRIMARY KEY, v text)", "INSERT INTO p VALUES (11, 'kept')")
    attach = "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20)"
    run(pg, *ROOT, attach, BY_ROOT)
    driver = begun(drive, rows=2, tables="public.*", onSchemaChange="emit", onNewTable="snapshot")
    with connect(db) as other:
        run(other, "BEGIN", "SELECT FROM r LIMIT 0")
        run(pg, "SET lock_timeout = '100ms'")
        # It commits that it has begun, waits for the other transaction, and gives up.
        with pytest.raises(psycopg2.errors.LockNotAvailable):
            run(pg, "ALTER TABLE r DETACH PARTITION p CONCURRENTLY")
        run(pg, "INSERT INTO r VALUES (2, 'b')")
        wait_until(lambda: driver.batch() is not None and "insert" in kinds(driver.rows))
        driver.restart()
        run(pg, "INSERT INTO r VALUES (3, 'c')")
        wait_until(lambda: driver.batch() is not None and kinds(driver.rows).count("insert") == 2)
    run(pg, "ALTER TABLE r DETACH PARTITION p FINALIZE", "INSERT INTO r VALUES (4, 'd')")
    wait_until(lambda: driver.batch() is not None and kinds(driver.rows).count("insert") == 3)
    # Nothing has come anew, which would have taken the detached rows from the sink.
    assert kinds(driver.rows) == ["insert"] * 3


@pytest.mark.parametrize("tables", ["public.r", "public.*"])
def test_kinds_of_changes_that_are_not_sent_of_partitions_are_missed(tables: str, db: str, pg: Session) -> None:
    parts = "CREATE TABLE parts.r_2 PARTITION OF r FOR VALUES FROM (10) TO (20)"
    run(pg, *ROOT, "CREATE SCHEMA parts", parts, "CREATE PUBLICATION s FOR TABLE r WITH (publish = 'insert, update')")
    options = parse_stream_options({"url": db, "tables": tables, "slot": "s"})
    published = read_publication(pg, options.publications)
    assert published is not None
    require_complete(pg, options, published)
    with pytest.raises(ServerSetupError, match="publication s does not send its deletes and truncates"):
        require_complete(pg, replace(options, may_lack_changes=lambda table: table != "parts.r_2"), published)


@pytest.mark.parametrize("tables", ["public.r", "public.*"])
@pytest.mark.parametrize("mode", ["fail", "emit"])
def test_a_partition_that_is_published_by_itself_is_noticed_as_well(
    mode: str, tables: str, pg: Session, drive: Drive
) -> None:
    run(pg, *ROOT, "CREATE TABLE r_2 PARTITION OF r FOR VALUES FROM (10) TO (20)", "INSERT INTO r VALUES (11, 'b')")
    run(pg, "CREATE PUBLICATION s FOR TABLE r")
    driver = begun(drive, rows=2, tables=tables, onSchemaChange=mode, onNewTable="snapshot")
    run(pg, "ALTER TABLE r_1 SET UNLOGGED")
    if mode == "fail":
        driver.refusal("public.r_1 is an unlogged table", kind=OptionError)
        return
    wait_until(lambda: driver.batch() is not None and "is an unlogged table" in str(values(driver.rows, "after")))
    driver.restart()
    run(pg, "INSERT INTO r VALUES (12, 'c')")
    wait_until(lambda: driver.batch() is not None and "insert" in kinds(driver.rows))
