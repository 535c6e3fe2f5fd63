"""Columns that change where the catalog is ahead of the stream: rows are PostgreSQL's, or their table stands aside."""

from __future__ import annotations

from typing import Any

import pytest
from driving import run
from lake import Begin, Lake, rows_of
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.stream.layouts.layout_history import LayoutHistory

M = "CREATE TABLE m (id int PRIMARY KEY)"
PAIRS = ("CREATE TABLE t (id int PRIMARY KEY, a int, b int)", "INSERT INTO t VALUES (1, 10, 100), (2, 20, 200)")
VIA_ROOT = "CREATE PUBLICATION s FOR TABLE m, t WITH (publish_via_partition_root = true)"
# What there is, and what happens before the stream sees any of it.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a name is taken over": (
        PAIRS,
        ("ALTER TABLE t DROP b", "ALTER TABLE t RENAME a TO b", "INSERT INTO t VALUES (3, 30)",
         "ALTER TABLE t ADD c int", "INSERT INTO t VALUES (4, 40, 4)"),
    ),
    "names are exchanged": (
        PAIRS,
        ("ALTER TABLE t RENAME a TO x", "ALTER TABLE t RENAME b TO a", "ALTER TABLE t RENAME x TO b",
         "INSERT INTO t (id, a, b) VALUES (3, 300, 30)", "ALTER TABLE t ADD c int", "ALTER TABLE t DROP a",
         "INSERT INTO t VALUES (4, 40, 4)"),
    ),
    "replaced by its like": (
        PAIRS,
        ("ALTER TABLE t DROP b", "ALTER TABLE t ADD b int", "INSERT INTO t VALUES (3, 30, 300)",
         "ALTER TABLE t ADD c int", "INSERT INTO t VALUES (4, 40, 400, 4)"),
    ),
    "replaced by its like, without a row behind": (
        PAIRS,
        ("ALTER TABLE t DROP b", "ALTER TABLE t ADD b int", "INSERT INTO t VALUES (3, 30, 300)",
         "ALTER TABLE t ADD c int"),
    ),
    "replaced by its like, which is renamed since": (
        PAIRS,
        ("ALTER TABLE t DROP b", "ALTER TABLE t ADD b int", "INSERT INTO t VALUES (3, 30, 300)",
         "ALTER TABLE t RENAME b TO c"),
    ),
    "a new one is replaced by its like": (
        ("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)"),
        ("ALTER TABLE t ADD a int", "INSERT INTO t VALUES (3, 30)", "ALTER TABLE t DROP a, ADD a int",
         "INSERT INTO t VALUES (4, 40)"),
    ),
    "one is retyped and replaced": (
        ("CREATE TABLE t (id int PRIMARY KEY, b varchar(9))", "INSERT INTO t VALUES (1, 'x')"),
        ("ALTER TABLE t ALTER b TYPE text", "INSERT INTO t VALUES (3, 'y')", "ALTER TABLE t DROP b, ADD c text",
         "INSERT INTO t VALUES (4, 'z')"),
    ),
    "one is retyped, renamed and replaced": (
        ("CREATE TABLE t (id int PRIMARY KEY, b varchar(9))", "INSERT INTO t VALUES (1, 'x')"),
        ("ALTER TABLE t ALTER b TYPE text", "ALTER TABLE t RENAME b TO c", "INSERT INTO t VALUES (3, 'y')",
         "ALTER TABLE t DROP c, ADD c text", "INSERT INTO t VALUES (4, 'z')"),
    ),
    "a generated column becomes a plain one": (
        ("CREATE TABLE t (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 2) STORED)",
         "INSERT INTO t (id, a) VALUES (1, 10), (2, 20)", VIA_ROOT),
        ("ALTER TABLE t ALTER g DROP EXPRESSION", "INSERT INTO t VALUES (3, 30, 7)"),
    ),
    "another type, and the rows stay": (
        ("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, -1)"),
        ("ALTER TABLE t ALTER a TYPE oid", "INSERT INTO t VALUES (3, 3)"),
    ),
}  # fmt: skip
OF_18 = {
    "behind a virtual column": (
        ("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 10)"),
        ("ALTER TABLE t ADD g int GENERATED ALWAYS AS (id * 2) VIRTUAL", "ALTER TABLE t ADD y int",
         "INSERT INTO t (id, a, y) VALUES (3, 300, 30)", "ALTER TABLE t ADD c int",
         "INSERT INTO t (id, a, y, c) VALUES (4, 40, 4, 5)"),
    ),
    "another expression of a partition": (
        ("CREATE TABLE t (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 2) STORED) PARTITION BY LIST (id)",
         "CREATE TABLE t1 PARTITION OF t DEFAULT", "INSERT INTO t (id, a) VALUES (1, 10), (2, 20)"),
        ("ALTER TABLE t1 ALTER g SET EXPRESSION AS (a * 3)", "INSERT INTO t (id, a) VALUES (3, 30)"),
    ),
}  # fmt: skip
VERSION_18 = 180000
# A virtual column is not in the stream.
SENT = """
SELECT string_agg(attname, ', ' ORDER BY attnum)
FROM pg_attribute
WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated <> 'v'
"""


@pytest.fixture(scope="module", params=["deltalake"])
def format(request: pytest.FixtureRequest) -> str:
    """What columns are is told before any format comes into it."""
    return str(request.param)


def _go_on(lake: Lake, pg: Session) -> bool:
    """Run a batch; whether the marker is there. Then the rows of ``t`` are PostgreSQL's, or it stands aside."""
    lake.step()
    last = lake.ledger.last()
    if last is None or lake.rows("m") != rows_of(pg, "m"):
        return False
    assert "public.t" in last.set_aside or lake.rows("t") == rows_of(pg, "sent")
    return True


def _change(pg: Session, *statements: str) -> None:
    run(pg, *statements)
    ((columns,),) = run(pg, SENT)
    run(pg, f"CREATE VIEW sent AS SELECT {columns} FROM t", "INSERT INTO m VALUES (1)")


@pytest.mark.parametrize(
    ("is_down", "rows"), [(False, "1"), (True, "1000000")], ids=["running, one row a batch", "down"]
)
@pytest.mark.parametrize("case", [*CASES, *OF_18])
def test_columns_of_rows_are_told_apart_or_the_rows_come_again(
    case: str, is_down: bool, rows: str, pg: Session, begin: Begin
) -> None:
    if case in OF_18 and pg.server_version < VERSION_18:
        pytest.skip("PostgreSQL 18 has it")
    first, then = {**CASES, **OF_18}[case]
    run(pg, M, *first)
    lake = begin(maxRowsPerBatch=rows)

    def is_loaded() -> bool:
        lake.step()
        last = lake.ledger.last()
        return last is not None and len(last.tables) == 2

    wait_until(is_loaded)
    if is_down:
        lake.driver.stop()
    _change(pg, *then)
    if is_down:
        lake.driver.start()
        lake.restart()

    def is_over() -> bool:
        last = lake.ledger.last() if _go_on(lake, pg) else None
        return last is not None and not last.set_aside

    wait_until(is_over)
    assert lake.rows("t") == rows_of(pg, "sent")


FULL = ("CREATE TABLE t (id int PRIMARY KEY, k int NOT NULL, v int)", "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES (1, 11, 1), (2, 12, 2)")  # fmt: skip
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "another one": (
        FULL,
        ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (k)", "UPDATE t SET id = 1", "ALTER TABLE t ADD c int"),
    ),
    "away in a transaction": (
        FULL,
        ("BEGIN; ALTER TABLE t DROP CONSTRAINT t_pkey; UPDATE t SET id = 2 WHERE v = 1;"
         " UPDATE t SET id = 1 WHERE v = 2; ALTER TABLE t ADD PRIMARY KEY (id); COMMIT",),
    ),
    "away for a while": (
        FULL,
        ("ALTER TABLE t DROP CONSTRAINT t_pkey", "INSERT INTO t VALUES (1, 5, 5)", "DELETE FROM t WHERE v = 5",
         "ALTER TABLE t ADD PRIMARY KEY (id)"),
    ),
    "away in the transaction that sets FULL": (
        (FULL[0], FULL[2]),
        ("BEGIN; ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t DROP CONSTRAINT t_pkey;"
         " INSERT INTO t VALUES (1, 5, 5); DELETE FROM t WHERE v = 1; ALTER TABLE t ADD PRIMARY KEY (id); COMMIT",),
    ),
    "an index before, and names are exchanged": (
        ("CREATE TABLE t (id int PRIMARY KEY, k int NOT NULL, v int)", "CREATE UNIQUE INDEX ik ON t (k)",
         "ALTER TABLE t REPLICA IDENTITY USING INDEX ik", "INSERT INTO t VALUES (1, 11, 1), (2, 12, 2)"),
        ("ALTER TABLE t REPLICA IDENTITY FULL", "DROP INDEX ik", "INSERT INTO t VALUES (3, 11, 3)",
         "ALTER TABLE t RENAME k TO x", "ALTER TABLE t RENAME id TO k", "ALTER TABLE t RENAME x TO id",
         "INSERT INTO t VALUES (4, 14, 4)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_under_full_another_key_sets_the_table_aside(case: str, pg: Session, begin: Begin) -> None:
    first, then = KEYS[case]
    lake = begin(M, *first)
    lake.driver.stop()
    _change(pg, *then)
    lake.driver.start()
    lake.restart()
    wait_until(lambda: _go_on(lake, pg))
    last = lake.ledger.last()
    assert last is not None
    assert "another key under REPLICA IDENTITY FULL" in last.set_aside["public.t"]


def test_a_column_that_came_and_went_is_not_known_before_it_was_sent(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(M, "CREATE TABLE t (id int PRIMARY KEY, b text)", "INSERT INTO t VALUES (1, 'b')")
    lake.driver.stop()
    _change(pg, "ALTER TABLE t DROP b", "INSERT INTO t VALUES (2)", "ALTER TABLE t ADD c text",
            "INSERT INTO t VALUES (3, 'c')", "ALTER TABLE t DROP c")  # fmt: skip
    compare, looks = LayoutHistory._compare, 0

    def comparing(*relation_and_known: Any) -> Any:
        nonlocal looks
        found = compare(*relation_and_known)
        looks += 1
        if looks == 1:
            # Behind the first look at the catalog, and before the one for the column that is gone.
            run(pg, "ALTER TABLE t ADD a text")
        return found

    monkeypatch.setattr(LayoutHistory, "_compare", comparing)
    lake.driver.start()
    lake.restart()
    wait_until(lambda: [lake.step(), all(lake.rows(table) == rows_of(pg, table) for table in "mt")][1])
    assert looks > 1
