"""A mirror that runs batch by batch without Spark, and what its tables have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from driving import Driver, Row
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.lake.apply import Task
from pg_cdc_source.lake.files import FileWriter
from pg_cdc_source.lake.ledger import Ledger, LedgerRow
from pg_cdc_source.lake.sink import Sink
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.protocol.layout import RUNS_SCHEMA

QUERY = "q"
Rows = Counter[tuple[str | None, ...]]


class Lake:
    """Tables below a directory, and the driver whose batches they take."""

    def __init__(self, driver: Driver, directory: Path) -> None:
        self.driver = driver
        self.targets = Targets.of(f"{directory}/{{table}}", None)
        self.ledger = Ledger(self.targets.ledger)
        self._sink = Sink(self.targets)
        self._batch: list[Row] | None = None  # one that was not applied to its end

    def step(self) -> LedgerRow | None:
        """Run one batch, or the one again that was not applied to its end; its row of the ledger."""
        number = self.driver.batches
        if self._batch is None:
            batch = self.driver.batch()
            if self.driver.batches == number:
                return None
            self._batch = batch
        row = self._sink.apply(QUERY, self.driver.batches - 1, self._run)
        self._batch = None
        return row

    def restart(self) -> None:
        """Forget what the process knows, as one that was killed."""
        self._sink = Sink(self.targets)

    def _run(self, task: Task) -> Iterable[Mapping[str, Any]]:
        assert self._batch is not None
        batch = pa.RecordBatch.from_pylist(self._batch, schema=RUNS_SCHEMA)
        rows = [row for out in FileWriter(self.targets).take(iter([batch])) for row in out.to_pylist()]
        return task.outcomes(rows)

    def found(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table, as delta-rs gives them."""
        rows: list[dict[str, Any]] = DeltaTable(self.targets[f"public.{table}"]).to_pyarrow_table().to_pylist()
        return rows

    def rows(self, table: str, version: int | None = None) -> Rows:
        return rows_of_lake(self.targets[f"public.{table}"], version)


def rows_of_lake(path: str, version: int | None = None) -> Rows:
    """The rows of a table, every value as text; columns in the order of their names."""
    found = DeltaTable(path, version=version).to_pyarrow_table()
    names = sorted(found.column_names)
    return Counter(tuple(map(_text, row)) for row in zip(*(found[name].to_pylist() for name in names), strict=True))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def rows_of(pg: Session, table: str) -> Rows:
    """As :func:`rows_of_lake`, of the source. It has numbers and texts."""
    with pg.cursor() as cursor:
        cursor.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(sql.Identifier(table)))
        names = sorted(column.name for column in cursor.description)
        columns = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in names)
        cursor.execute(sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(table)))
        return Counter(cursor.fetchall())


def is_same(lake: Lake, pg: Session, *tables: str) -> Callable[[], bool]:
    """A look for ``wait_until``: run a batch, and compare."""

    def look() -> bool:
        lake.step()
        last = lake.ledger.last()
        there = set() if last is None else set(last.tables)
        return {f"public.{table}" for table in tables} <= there and all(
            lake.rows(table) == rows_of(pg, table) for table in tables
        )

    return look
