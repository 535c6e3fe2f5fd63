"""Soft deletes, and a table that gets another key: no deleted row has the key of a present one, now or later."""

from __future__ import annotations

import pytest
from breaking import breaking, wait_for
from driving import run
from lake import Begin, Lake
from psycopg2.extensions import connection as Session

TABLE = "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL, v text)"
# Two deleted rows have one code.
TWO = (
    *("INSERT INTO t VALUES (1, 'a', 'x')", "DELETE FROM t WHERE id = 1"),
    *("INSERT INTO t VALUES (2, 'a', 'x')", "DELETE FROM t WHERE id = 2"),
)
BY_CODE = "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (code)"
NEW = "INSERT INTO t VALUES (3, 'a', 'n')"
AGAIN = """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')"""


@pytest.fixture(scope="module", params=["deltalake"])
def format(request: pytest.FixtureRequest) -> str:
    """What the formats do for it is tested in test_modes."""
    return str(request.param)


def all_rows(lake: Lake) -> list[tuple[int, str, bool]]:
    return sorted((row["id"], row["code"], row["_deleted"]) for row in lake.found("t"))


@pytest.mark.parametrize(
    "batches",
    [
        [(BY_CODE,), (NEW,)],
        [(BY_CODE, "TRUNCATE t", NEW)],
        [(BY_CODE, "INSERT INTO t VALUES (4, 'a', 'n')", "TRUNCATE t", NEW)],
        [(BY_CODE, "TRUNCATE t"), (NEW,)],
        [(BY_CODE, AGAIN), (NEW,)],
        [("CREATE UNIQUE INDEX i ON t (code)", "ALTER TABLE t REPLICA IDENTITY USING INDEX i"), (NEW,)],
    ],
    ids=["later", "truncated", "truncated again", "truncated, and later", "again, and later", "index"],
)
def test_the_key_and_rows_of_it_come_in_batches_of_their_own(
    batches: list[tuple[str, ...]], pg: Session, begin: Begin
) -> None:
    lake = begin(TABLE, deletes="soft")
    for batch in (TWO, *batches):
        run(pg, *batch)
        wait_for(lake, pg, lake.step)
    assert all_rows(lake) == [(3, "a", False)]


@pytest.mark.parametrize("ddl", [BY_CODE, "ALTER TABLE t REPLICA IDENTITY FULL"], ids=["code", "full"])
def test_a_table_that_has_had_no_row_yet(ddl: str, pg: Session, begin: Begin) -> None:
    lake = begin(TABLE, deletes="soft")
    run(pg, ddl, NEW)
    wait_for(lake, pg, lake.step)
    assert all_rows(lake) == [(3, "a", False)]


def test_nothing_is_told_apart_by_a_key_behind_the_next_one(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(TABLE, "INSERT INTO t VALUES (5, 'b', 'x'), (9, 'z', 'y')", deletes="soft")
    step = breaking(lake, monkeypatch)
    lake.driver.stop()
    # A deleted row and a present one have one id, which is the key no more, and will not be again.
    run(pg, "UPDATE t SET v = 'p' WHERE id = 9", BY_CODE, "DELETE FROM t WHERE code = 'b'",
        "INSERT INTO t VALUES (5, 'c', 'w')", "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (v)",
        "INSERT INTO t VALUES (6, 'd', 'u')")  # fmt: skip
    lake.driver.start()
    lake.restart()
    wait_for(lake, pg, step)
    assert all_rows(lake) == [(5, "b", True), (5, "c", False), (6, "d", False), (9, "z", False)]
