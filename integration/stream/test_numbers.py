"""``_seq``: the LSN of a change's WAL record, whatever else is sent of its commit."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

import pytest
from databases import connect
from driving import Drive, Driver, Row, run, values
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.offsets import Lsn


@pytest.mark.corner
@pytest.mark.parametrize("work_mem", ["64MB", "64kB"], ids=["whole", "streamed"])
def test_a_change_has_the_lsn_that_postgresql_gives_for_it(work_mem: str, db: str, pg: Session, drive: Drive) -> None:
    """Whatever else is published, and whether its transaction is sent whole or before it commits.

    Batches end within the commit and within records, and another walsender sends the rest.
    """
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE other (LIKE t INCLUDING ALL)",
        "CREATE PUBLICATION of_t FOR TABLE t", "CREATE PUBLICATION of_both FOR TABLE t, other",
        f"ALTER DATABASE {pg.info.dbname} SET logical_decoding_work_mem = '{work_mem}'")  # fmt: skip
    drivers = [
        drive(tables="public.t", slot=publication, publication=publication, maxRowsPerBatch="97")
        for publication in ("of_t", "of_both")
    ]
    for driver in drivers:
        driver.batch()
        driver.take(0)
    run(pg, "SELECT pg_create_logical_replication_slot('judge', 'pgoutput')")
    with connect(db) as session:
        change_much(session)
    told = list(told_by_a_slot(pg))
    assert len(told) > 1000
    for driver in drivers:
        rows: list[Row] = []

        def has_more(rows: list[Row] = rows, driver: Driver = driver) -> bool:
            more = driver.batch()
            rows += more
            return bool(more)

        while len(rows) < len(told):
            wait_until(has_more, 30)
            driver.restart()
        assert values(rows, "_change_type", "_commit_lsn", "_seq") == told


def change_much(session: Session) -> None:
    """Commit records of many rows, with some of the other table between, and one of both tables."""
    copied = "".join(f"{i}\tcopied\n" for i in range(1, 701))
    run(session, "BEGIN", "INSERT INTO t VALUES (-1, 'a')")
    with session.cursor() as cursor:
        for table in ("t", "other"):
            cursor.copy_expert(f"COPY {table} FROM STDIN", io.StringIO(copied))
    run(session,
        "UPDATE t SET v = 'b' WHERE id % 10 = 0",
        "UPDATE t SET id = -id WHERE id % 50 = 2",
        "SAVEPOINT s",
        "INSERT INTO t SELECT i, 'never' FROM generate_series(2000, 2100) AS i",
        "ROLLBACK TO s",
        "UPDATE other SET id = -id WHERE id % 2 = 1",
        "DELETE FROM t WHERE id % 3 = 0",
        "TRUNCATE t, other",
        "INSERT INTO t VALUES (1, 'last')",
        "COMMIT")  # fmt: skip


def told_by_a_slot(pg: Session) -> Iterator[tuple[str, int, int]]:
    """Kind, commit and number of each change of t, by the LSNs that PostgreSQL's SQL function gives."""
    messages = run(
        pg,
        "SELECT lsn, data FROM pg_logical_slot_get_binary_changes('judge', NULL, NULL, 'proto_version', '1',"
        " 'publication_names', 'of_both')",
    )
    run(pg, "SELECT pg_drop_replication_slot('judge')")
    names: dict[int, bytes] = {}
    commit = last = 0
    for lsn, data in messages:
        kind, body, at = bytes(data[:1]), bytes(data[1:]), int(Lsn.parse(lsn))
        (first,) = struct.unpack_from(">I", body)
        table = names.get(first)
        if kind == b"B":
            (commit,) = struct.unpack_from(">Q", body)
        elif kind == b"R":
            names[first] = body[4:].split(b"\0")[1]
        elif kind == b"T":
            oids = struct.unpack_from(f">{first}I", body, 5)
            yield from (("truncate", commit, at + i) for i, oid in enumerate(oids) if names[oid] == b"t")
        elif kind in b"IUD":
            # Rows of one record follow each other, and a changed key is two rows.
            last = max(last + 1, at)
            if table == b"t" and kind == b"U":
                moved = body[4:5] == b"K"
                yield from [("delete", commit, last)] if moved else []
                yield "insert" if moved else "update", commit, last + 1
            elif table == b"t":
                yield "insert" if kind == b"I" else "delete", commit, last
