"""Tables of the initial snapshot share a micro-batch while they are small."""

from __future__ import annotations

from itertools import chain

import pytest
from databases import connect
from driving import driving, run
from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres import trees
from pg_cdc_source.spark.pgcdc import HAS_LIMITS

# Names in the order of their oids; b and its partitions are 16 kB, large is 80 kB and more.
TABLES = (
    *("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)"),
    "CREATE TABLE b (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    *(f"CREATE TABLE b{i} PARTITION OF b FOR VALUES FROM ({i}) TO ({i + 1})" for i in (1, 2)),
    "INSERT INTO b VALUES (1), (2)",
    *("CREATE TABLE large (id int PRIMARY KEY, v text)", "ALTER TABLE large ALTER v SET STORAGE EXTERNAL"),
    "INSERT INTO large SELECT i, repeat(md5(i::text), 300) FROM generate_series(1, 9) AS i",
    *("CREATE TABLE x (id int PRIMARY KEY)", "INSERT INTO x VALUES (1)"),
    "CREATE TABLE z (id int PRIMARY KEY)",
)


def test_small_tables_share_a_batch_and_a_large_one_has_its_own(
    pg: Session, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = trees.read_sizes
    run(pg, *TABLES)
    with driving(pg, db, monkeypatch) as drive:
        monkeypatch.setattr(trees, "read_sizes", sizes)
        driver = drive(tables="public.*", maxBytesPerBatch="64kB")
        found: list[list[str]] = []
        while not found or driver.offset.is_reading:
            names = [row["_table"] for row in driver.batch()]
            assert sorted(names) == sorted(row["_table"] for row in driver.again())
            found.append(names)
        small, large, last = {"public.a", "public.b"}, {"public.large"}, {"public.x"}
        assert [set(names) for names in found] == ([small, large, last] if HAS_LIMITS else [small | large | last])
        assert sorted(chain(*found)) == ["public.a", *["public.b"] * 2, *["public.large"] * 9, "public.x"]


def test_a_table_that_is_being_dropped_has_no_size(pg: Session, db: str) -> None:
    """Its row of the catalog may still be seen when its file is gone."""
    run(pg, "CREATE TABLE a (id int)", "CREATE TABLE b (id int)", "INSERT INTO a VALUES (1)")
    [(a, b)] = run(pg, "SELECT 'a'::regclass::oid::bigint, 'b'::regclass::oid::bigint")
    with connect(db) as session:
        run(session, "BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT FROM pg_class LIMIT 1")
        run(pg, "DROP TABLE b")
        assert trees.read_sizes(session, [a, b]) == {a: 8192, b: 0}


def test_a_table_that_somebody_rewrites_holds_up_no_other(
    pg: Session, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = trees.read_sizes
    run(pg, *(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in "abc"), "INSERT INTO b VALUES (1)")
    with driving(pg, db, monkeypatch) as drive, connect(db) as other:
        driver = drive(tables="public.*")
        assert driver.batch() == []
        assert driver.offset.done == (1 if HAS_LIMITS else 3)
        monkeypatch.setattr(trees, "read_sizes", sizes)
        run(other, "BEGIN", "LOCK TABLE c")
        assert trees.read_sizes(pg, [run(pg, "SELECT 'c'::regclass::oid::bigint")[0][0]]) is None
        assert run(pg, "SHOW lock_timeout") == [("30s",)]
        if HAS_LIMITS:
            assert [row["_table"] for row in driver.batch()] == ["public.b"]
            assert driver.offset.done == 2
        run(other, "ROLLBACK")
        driver.take(0)
