"""Tables that are altered while nobody writes to them: the lake has PostgreSQL's columns and values all the same."""

from __future__ import annotations

import pytest
from driving import run
from lake import Begin, is_same, rows_of
from psycopg2.extensions import connection as Session
from watch import wait_until

T = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TABLE t (mood mood PRIMARY KEY, n int, v text, p numeric(6,2))",
    "INSERT INTO t VALUES ('sad', 1, 'a', 1.50), ('ok', 2, 'b', NULL)",
)


@pytest.mark.corner
def test_what_is_altered_without_a_change_is_in_the_lake(pg: Session, begin: Begin) -> None:
    lake = begin(*T)
    is_same_now = is_same(lake, pg, "t")
    for statement in (
        "ALTER TABLE t ADD f int DEFAULT 5",
        'ALTER TABLE t RENAME v TO "V"',
        "ALTER TABLE t RENAME n TO m; ALTER TABLE t RENAME f TO n; ALTER TABLE t RENAME m TO f",
        "ALTER TABLE t DROP n",
        "ALTER TABLE t ALTER f TYPE bigint USING f * 10",
        "ALTER TABLE t ADD s serial",
        # PostgreSQL leaves the rows as they are.
        "ALTER TABLE t ALTER p TYPE numeric(12,2)",
        "ALTER TABLE t ALTER p TYPE numeric",
    ):
        run(pg, statement)
        # Where its values are the same before its rows come again, the table stands aside for a while.
        wait_until(lambda: is_same_now() and (last := lake.ledger.last()) is not None and not last.set_aside)
        # So is the version that the ledger names.
        last = lake.ledger.last()
        assert last is not None
        assert lake.rows("t", last.tables["public.t"]) == rows_of(pg, "t"), statement
    lake.restart()
    # Its rows would not be found by their keys any more.
    run(pg, "ALTER TYPE mood RENAME VALUE 'ok' TO 'fine'")
    wait_until(is_same(lake, pg, "t"))
    run(pg, "UPDATE t SET f = 7 WHERE mood = 'fine'", "DELETE FROM t WHERE mood = 'sad'")
    wait_until(is_same(lake, pg, "t"))
