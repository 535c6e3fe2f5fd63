"""A table that is altered all the time is rebuilt from its stream alone, by the numbers of its columns.

The process that reads is replaced again and again, and each batch is read twice. Where the stream says that a table is
rewritten, the rows from before are not compared until they change: they come again by themselves.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg2
import pytest
from driving import Drive, Row, run
from psycopg2.extensions import connection as Session

Values = dict[int, Any]  # by the columns' numbers
TYPES = ("int", "bigint", "text", "varchar(20)", "numeric(10, 2)")
DEFAULTS = ("", "", " DEFAULT 7", " DEFAULT 70", " DEFAULT (random() * 9)::int")


class Mirror:
    """What a sink knows after each row."""

    def __init__(self) -> None:
        self.columns: dict[str, int] = {}
        self.rows: dict[int, Values] = {}
        self.stale: set[int] = set()
        self.changes: list[str] = []

    def apply(self, row: Row) -> None:
        kind = row["_change_type"]
        if kind == "schema":
            self._alter(json.loads(row["after"]))
        elif kind == "truncate":
            self.rows.clear()
            self.stale.clear()
        else:
            ident = json.loads(row["key"])["id"]
            self.stale.discard(ident)
            if kind == "delete":
                del self.rows[ident]
            else:
                after = json.loads(row["after"])
                assert set(after) == set(self.columns), (after, self.columns)
                self.rows[ident] = {self.columns[name]: value for name, value in after.items()}

    def _alter(self, layout: dict[str, Any]) -> None:
        self.columns = {column["name"]: column["attnum"] for column in layout["columns"]}
        assert None not in self.columns.values() or "rewritten" in [c["change"] for c in layout["changes"]], layout
        for change in layout["changes"]:
            self.changes.append(change["change"])
            if change["change"] == "rewritten":
                self.stale = set(self.rows)
            for values in self.rows.values():
                if change["change"] == "dropped":
                    values.pop(change["attnum"], None)
                elif change["change"] == "added":
                    values[change["attnum"]] = change["fill"]


def altering(rng: random.Random, columns: list[str], number: int) -> str:
    """A statement that changes the columns besides ``id``; ``columns`` are their names, before and after."""
    what = rng.choice(("add", "add", "drop", "rename", "retype", "again", "identity", "vacuum"))
    if not columns or what == "add":
        columns.append(f"c{number}")
        return f"ALTER TABLE t ADD c{number} {rng.choice(TYPES)}{rng.choice(DEFAULTS)}"
    name = rng.choice(columns)
    if what == "drop":
        columns.remove(name)
        return f"ALTER TABLE t DROP {name}"
    if what == "rename":
        columns[columns.index(name)] = f"r{number}"
        return f"ALTER TABLE t RENAME {name} TO r{number}"
    if what == "retype":
        return f"ALTER TABLE t ALTER {name} DROP DEFAULT, ALTER {name} TYPE text"
    if what == "again":
        columns.append(columns.pop(columns.index(name)))
        return f"ALTER TABLE t DROP {name}; ALTER TABLE t ADD {name} text"
    if what == "vacuum":
        return "VACUUM FULL t"
    return f"ALTER TABLE t REPLICA IDENTITY {rng.choice(('FULL', 'DEFAULT'))}"


def writing(rng: random.Random, columns: Sequence[str], ident: int) -> str:
    sets = ", ".join(f"{name} = '{rng.randrange(100)}'" for name in columns) or "id = id"
    which = rng.random()
    if which < 0.5:
        names = "".join(f", {name}" for name in columns)
        values = "".join(f", '{rng.randrange(100)}'" for _ in columns)
        return f"INSERT INTO t (id{names}) VALUES ({ident}{values})"
    if which < 0.8:
        return f"UPDATE t SET {sets} WHERE id % 5 = {rng.randrange(5)}"
    if which < 0.98:
        return f"DELETE FROM t WHERE id % 7 = {rng.randrange(7)}"
    return "TRUNCATE t"


@contextlib.contextmanager
def written(db: str, seed: int, count: int) -> Iterator[threading.Thread]:
    """Write and alter in a thread."""
    rng = random.Random(seed)
    columns: list[str] = ["a", "b"]
    failed: list[BaseException] = []

    def write() -> None:
        try:
            with contextlib.closing(psycopg2.connect(db)) as session, session.cursor() as cursor:
                session.autocommit = True
                for n in range(count):
                    statements = [writing(rng, columns, n * 10 + i + 100) for i in range(rng.randrange(1, 4))]
                    if rng.random() < 0.3:
                        statements.append(altering(rng, columns, n))
                        statements.append(writing(rng, columns, n * 10 + 109))
                    if rng.random() < 0.5 and "VACUUM FULL t" not in statements:
                        statements = [f"BEGIN; {'; '.join(statements)}; COMMIT"]
                    for statement in statements:
                        cursor.execute(statement)
                    time.sleep(rng.random() * 0.02)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()
    assert not failed, failed


@pytest.mark.parametrize("seed", range(4))
def test_a_table_is_rebuilt_from_its_stream(seed: int, db: str, pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a int, b text)",
        "INSERT INTO t SELECT n, n, n FROM generate_series(1, 20) AS n")  # fmt: skip
    rng, mirror = random.Random(seed), Mirror()
    driver = drive(tables="public.*", onSchemaChange="emit", maxRowsPerBatch="50")
    # A table that is truncated before it was read is refused.
    while driver.batches == 0 or driver.offset.done < len(driver.offset.tables):
        driver.batch()
    for row in driver.rows:
        mirror.apply(row)
    quiet_since: float | None = None
    with written(db, seed, 150) as writer:
        while quiet_since is None or time.monotonic() < quiet_since + 2:
            if rng.random() < 0.1:
                driver.restart()
            batch = driver.batch()
            if batch and rng.random() < 0.5:
                assert driver.again() == batch
            for row in batch:
                mirror.apply(row)
            if batch or writer.is_alive():
                quiet_since = None
            elif quiet_since is None:
                quiet_since = time.monotonic()
    present = run(pg, "SELECT attnum, attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0"
                      " AND NOT attisdropped ORDER BY attnum")  # fmt: skip
    texts = ", ".join(f"CASE WHEN num_nulls({name}) = 0 THEN format('%s', {name}) END" for _, name in present)
    numbers = [number for number, _ in present]
    table = {int(row[0]): dict(zip(numbers, row, strict=True)) for row in run(pg, f"SELECT {texts} FROM t")}
    assert set(mirror.rows) == set(table)
    assert len(set(mirror.changes)) > 4, mirror.changes
    compared = mirror.rows.keys() - mirror.stale
    for ident in compared:
        # Columns that changed after the last row are not said yet.
        values = {n: None if v is None else str(v) for n, v in mirror.rows[ident].items() if n is not None}
        there = {n: table[ident][n] for n in values if n in table[ident]}
        assert {n: values[n] for n in there} == there, (ident, mirror.columns, present)
