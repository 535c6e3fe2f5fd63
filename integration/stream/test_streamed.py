"""Transactions that the server sends before they commit, while others change the tables."""

from __future__ import annotations

import json

from databases import connect
from driving import Drive, run
from psycopg2.extensions import connection as Session
from watch import wait_until

RENAMED = ("ALTER TABLE t RENAME a TO x", "ALTER TABLE t RENAME b TO a", "ALTER TABLE t RENAME x TO b")


def test_columns_that_are_renamed_meanwhile_stay_so(db: str, pg: Session, drive: Drive) -> None:
    """Servers of before May 2025 describe the table no more when the other transaction has committed."""
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a int, b int)", "CREATE TABLE other (id int PRIMARY KEY)",
        f"ALTER DATABASE {pg.info.dbname} SET logical_decoding_work_mem = '64kB'")  # fmt: skip
    driver = drive(tables="public.*", onSchemaChange="emit")

    def inserted(count: int) -> list[dict[str, int]] | None:
        driver.batch()
        found = [json.loads(row["after"]) for row in driver.rows if row["_change_type"] == "insert"]
        return found if len(found) >= count else None

    def is_sent() -> object:
        driver.batch()
        return run(pg, "SELECT 1 FROM pg_stat_replication_slots WHERE slot_name = 's' AND stream_txns > 0")

    driver.batch()
    with connect(db) as waiting:
        run(waiting, "BEGIN; SAVEPOINT s; INSERT INTO t SELECT i, i, i FROM generate_series(1, 5000) AS i")
        wait_until(is_sent)
        run(waiting, "ROLLBACK TO s", "INSERT INTO other VALUES (1)")
        run(pg, *RENAMED, "INSERT INTO t VALUES (1, 10, 20)")
        wait_until(lambda: inserted(1))
        run(waiting, "COMMIT")
    run(pg, "INSERT INTO t VALUES (2, 10, 20)")
    assert wait_until(lambda: inserted(3)) == [{"id": 1, "b": 10, "a": 20}, {"id": 1}, {"id": 2, "b": 10, "a": 20}]
