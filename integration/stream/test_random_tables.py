"""Tables come and go at random under load, and the stream's process ends at random: the rows end right."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterable

import pytest
from driving import Drive, Driver, Row, run
from psycopg2.extensions import connection as Session
from random_tables import RandomTables
from replica import upserted
from watch import wait_until

from pg_cdc_source.errors import PgCdcError

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "1 2 5").split()]
SECONDS = 8.0


def changes(rows: Iterable[Row]) -> Counter[tuple[tuple[str, str], ...]]:
    """Rows as they can be compared. Those of a table that was read again may be in the state of a later change."""
    return Counter(
        tuple((name, str(value)) for name, value in row.items()) for row in rows if row["_change_type"] != "snapshot"
    )


class Crashing:
    """Runs a stream's batches, and ends its process at random in between."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver = driver
        self.batches: list[list[Row]] = []
        self.crashes: Counter[str] = Counter()
        self.refusals: list[str] = []
        self._random = random.Random(f"{seed} crash")
        self._attempted: list[Row] | None = None  # of the batch that is to be repeated
        self._refused = 0

    def step(self, *, crash: bool) -> None:
        """Run one batch, or only its beginning; a query that ends with an error is started again, as it says."""
        moment = self._random.choice(("", "", "", "planned", "read", "over", "before")) if crash else ""
        try:
            if moment in ("planned", "read"):
                rows = self.driver.attempt(read=moment == "read")
                if moment == "read" and rows is not None:
                    self._compare(rows)
            elif moment != "before":
                before = self.driver.batches
                rows = self.driver.batch()
                if self.driver.batches > before:
                    self._compare(rows)
                    self._attempted = None
                    self.batches.append(rows)
            self._refused = 0
        except PgCdcError as error:
            self._refused += 1
            self.refusals.append(str(error))
            if ("same checkpoint" not in str(error) and "start over" in str(error)) or self._refused == 20:
                raise
            moment = "refused"
        if moment:
            self.crashes[moment] += 1
            self.driver.restart()

    def _compare(self, rows: list[Row]) -> None:
        if self._attempted is not None:
            assert changes(rows) == changes(self._attempted)
        self._attempted = rows


def published(pg: Session) -> list[str]:
    return [name for (name,) in run(pg, "SELECT tablename FROM pg_publication_tables WHERE pubname = 's'")]


@pytest.mark.parametrize("seed", SEEDS)
def test_tables_that_come_and_go_end_right(seed: int, pg: Session, db: str, drive: Drive) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    tables = RandomTables(db, seed, listed=rng.random() < 0.5)
    tables.create()
    limit = rng.choice(("3", "20", "100000"))
    stream = Crashing(drive(tables="public.*", onSchemaChange="ignore", maxRowsPerBatch=limit), seed)
    # A table that goes before its rows of the initial snapshot were read is an error.
    while not stream.batches or stream.driver.offset.is_reading:
        stream.step(crash=rng.random() < 0.3)
    until = time.monotonic() + SECONDS
    with tables.changing() as failures:
        while time.monotonic() < until and not failures:
            stream.step(crash=rng.random() < 0.3)
    print(f"limit {limit}; {tables.done}; {stream.crashes}; {set(stream.refusals)}")
    renamed = sorted(tables.renamed)

    def ends_right() -> bool:
        stream.step(crash=False)
        return not differences(pg, stream, [name for name in published(pg) if name not in renamed])

    try:
        wait_until(ends_right, 40)
        # A table that took another's name: its rows are there under the old one until somebody asks.
        for name in renamed:
            run(pg, f"""SELECT pg_logical_emit_message(true, 'pgcdc', '{{"snapshot": ["public.{name}"]}}')""")
        renamed.clear()
        wait_until(ends_right, 40)
    except AssertionError:
        print(f"members {stream.driver.offset}; {set(stream.refusals)}")
        for name, line in differences(pg, stream, published(pg)).items():
            print(f"{name}: {line}")
            for number, batch in enumerate(stream.batches):
                for row in batch:
                    if row["_table"] == f"public.{name}":
                        print(number, row["_commit_lsn"], row["_seq"], row["_change_type"], row["key"], row["after"])
        raise


def differences(pg: Session, stream: Crashing, names: Iterable[str]) -> dict[str, str]:
    """What a sink that takes batch after batch, and one that sorts all rows, have otherwise than the source."""
    found = {}
    both = upserted(stream.batches), upserted([[row for batch in stream.batches for row in batch]])
    for name in names:
        there = dict(run(pg, f"SELECT id, v FROM {name}"))
        for way, sink in zip(("by batch", "sorted"), both, strict=True):
            if sink.get(f"public.{name}", {}) != there:
                has = sink.get(f"public.{name}", {})
                lacks = {key: value for key, value in there.items() if has.get(key) != value}
                surplus = {key: value for key, value in has.items() if key not in there}
                found[name] = f"{way} lacks {lacks} and has {surplus}"
    return found
