"""Streams as the tests run them: a query whose batches are collected, and what it leaves on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from watch import wait_until

from pg_cdc_source.protocol.layout import ENVELOPE_SCHEMA


@dataclass
class Collected:
    """The batches that a query has given to its sink, by their ids."""

    batches: dict[int, list[Row]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [row for batch in sorted(self.batches) for row in self.batches[batch]]


def load_stream(spark: SparkSession, db: str, **options: str | int | bool) -> DataFrame:
    """Load a DataFrame of ``pgcdc`` from ``db``."""
    return spark.readStream.format("pgcdc").options(url=db, **options).load()


@contextmanager
def running(
    rows: DataFrame, checkpoint: Path, into: Collected, on_batch: Callable[[DataFrame, int], None] | None = None
) -> Iterator[StreamingQuery]:
    """Run a query that collects the batches of ``rows`` until the block ends; its failure is raised at the end."""

    def sink(batch: DataFrame, batch_id: int) -> None:
        if on_batch is not None:
            on_batch(batch, batch_id)
        into.batches[batch_id] = sorted(batch.collect(), key=lambda row: (row["_commit_lsn"], row["_seq"]))

    query = rows.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint)).start()
    try:
        yield query
    finally:
        query.stop()
    if (error := query.exception()) is not None:
        raise error


def wait_for_rows(query: StreamingQuery, into: Collected, count: int, seconds: float = 120.0) -> list[Row]:
    """Wait until ``count`` rows have come, and return them in order; fails at once when the query does."""

    def look() -> bool:
        if (error := query.exception()) is not None:
            raise error
        return len(into.rows) >= count

    wait_until(look, seconds)
    assert len(into.rows) == count
    return into.rows


TABLE = 'public."T able"'


NOW = datetime(2024, 2, 29, 12, tzinfo=timezone.utc)


def envelope(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> DataFrame:
    schema = from_arrow_schema(ENVELOPE_SCHEMA)
    given = {"_table": TABLE, "_commit_lsn": 1, "_commit_ts": NOW, "_xid": 5, "_unchanged": []}
    values = [{**given, "_seq": i, **row} for i, row in enumerate(rows)]
    return spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in values], schema)
