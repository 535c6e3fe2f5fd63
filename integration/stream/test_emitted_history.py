"""A table that is altered again and again is rebuilt from its stream alone, by the numbers of its columns.

The process that reads is replaced again and again, and many batches are read twice. The catalog is often ahead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from driving import Drive, Driver, Row, run
from layout_mirror import Mirror
from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.stream import next_offset
from pg_cdc_source.stream.tables import looks

TYPES = ("text", "varchar(20)")
DEFAULTS = ("", " DEFAULT '7'", " DEFAULT 'seventy'")


def altering(rng: random.Random, columns: list[str], number: int) -> str:
    """A statement that changes the columns besides ``id``; ``columns`` are their names, before and after."""
    what = rng.choice(("add", "add", "drop", "rename", "retype", "again", "identity"))
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
    return f"DELETE FROM t WHERE id % 7 = {rng.randrange(7)}"


def in_order(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["_commit_lsn"], row["_seq"], row["_change_type"] != "schema"))


def take_all(pg: Session, driver: Driver, mirror: Mirror, rng: random.Random) -> None:
    """Take what was written, until all of it has come and no rows are due."""
    ((lsn,),) = run(pg, "SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint")
    end = Position.before(Lsn(lsn))
    while driver.offset.is_reading or driver.offset.due or driver.offset.position < end:
        batch = driver.batch()
        if batch and rng.random() < 0.3:
            assert driver.again() == batch
        for row in in_order(batch):
            mirror.apply(row)


@pytest.mark.parametrize("seed", range(2))
def test_a_table_is_rebuilt_from_its_stream(
    seed: int, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stream that is quiet says at once how far it has come, and is asked until it has it all. Looks at the catalog
    # come as often among the steps as they do where each step takes a second.
    monkeypatch.setattr(next_offset, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(next_offset, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(looks, "WATCH_SECONDS", 0.2)
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a text, b text)",
        "INSERT INTO t SELECT n, n, n FROM generate_series(1, 20) AS n")  # fmt: skip
    rng, mirror, columns = random.Random(seed), Mirror(), ["a", "b"]
    # How many batches there are is not said by the seed.
    again = random.Random(f"{seed} again")
    driver = drive(tables="public.*", onSchemaChange="emit", maxRowsPerBatch="50")
    while driver.batches == 0 or driver.offset.done < len(driver.offset.tables):
        driver.batch()
    for row in driver.rows:
        mirror.apply(row)
    for n in range(30):
        if rng.random() < 0.2:
            driver.restart()
        # The stream may find several changes at once in the catalog.
        for i in range(rng.randrange(1, 3)):
            statements = [writing(rng, columns, n * 100 + i * 10 + k + 100) for k in range(rng.randrange(1, 4))]
            if rng.random() < 0.4:
                statements.append(altering(rng, columns, n * 10 + i))
                statements.append(writing(rng, columns, n * 100 + i * 10 + 109))
            run(pg, *([f"BEGIN; {'; '.join(statements)}; COMMIT"] if rng.random() < 0.5 else statements))
        take_all(pg, driver, mirror, again)
    present = run(pg, "SELECT attnum, attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0"
                      " AND NOT attisdropped ORDER BY attnum")  # fmt: skip
    texts = ", ".join(f"CASE WHEN num_nulls({name}) = 0 THEN format('%s', {name}) END" for _, name in present)
    numbers = [number for number, _ in present]
    table = {int(row[0]): dict(zip(numbers, row, strict=True)) for row in run(pg, f"SELECT {texts} FROM t")}
    assert set(mirror.rows) == set(table)
    assert len(set(mirror.changes)) >= 4, mirror.changes
    assert not mirror.stale
    for ident in mirror.rows:
        # Columns that changed after the last row are not said yet.
        values = {n: None if v is None else str(v) for n, v in mirror.rows[ident].items() if n is not None}
        there = {n: table[ident][n] for n in values if n in table[ident]}
        assert {n: values[n] for n in there} == there, (ident, mirror.columns, present)
