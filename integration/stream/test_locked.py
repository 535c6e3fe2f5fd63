"""A table that somebody has locked, as a long migration does, does not hold up the changes of the others."""

from __future__ import annotations

import functools
import itertools
import time

import pytest
from databases import connect
from driving import SLOT, Drive, run
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.stream.tables import look_pace, looks

LOCKED_SECONDS = 3.0


@pytest.mark.parametrize("schema_change", ["fail", "emit"])
def test_ddl_that_goes_on_does_not_hold_up_other_tables(
    pg: Session,
    db: str,
    drive: Drive,
    schema_change: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Looks begin soon enough that one which waits for the lock would hold up changes for longer than they may be.
    monkeypatch.setattr(looks, "WATCH_SECONDS", 0.2)
    monkeypatch.setattr(look_pace, "_SAY_SECONDS", 0.5)
    run(pg, "CREATE TABLE busy (id int PRIMARY KEY)", "CREATE TABLE migrated (id int PRIMARY KEY)")
    run(pg, f"CREATE PUBLICATION {SLOT} FOR TABLE busy, migrated")
    driver = drive(tables="public.*", onSchemaChange=schema_change, onNewTable="snapshot")

    def came(table: str, key: int) -> bool:
        rows = [row for row in driver.batch() if row["_change_type"] in ("insert", "snapshot")]
        return any(row["_table"] == f"public.{table}" and f'"id":{key}' in row["after"] for row in rows)

    # Until the initial snapshot is over.
    wait_until(lambda: not driver.batch() and driver.offset.done == len(driver.offset.tables))
    longest, keys = 0.0, itertools.count(1)
    with connect(db) as other:
        run(other, "BEGIN", "ALTER TABLE migrated ADD note text")
        pid = other.info.backend_pid
        ends = time.monotonic() + LOCKED_SECONDS
        while time.monotonic() < ends:
            key = next(keys)
            run(pg, f"INSERT INTO busy VALUES ({key})")
            began = time.monotonic()
            wait_until(functools.partial(came, "busy", key))
            longest = max(longest, time.monotonic() - began)
        run(other, "COMMIT")
    assert longest < 2
    said = [text for record in caplog.records if "could not be looked at" in (text := record.getMessage())]
    assert said, caplog.text
    assert f"(locked: public.migrated by pid {pid})" in said[0]
    # Then looks see again what there is.
    run(pg, "CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later VALUES (7)")
    run(pg, f"ALTER PUBLICATION {SLOT} ADD TABLE later")
    wait_until(lambda: came("later", 7))
