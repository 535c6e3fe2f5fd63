"""Stream values of every type, and compare them with what a snapshot reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from type_values import assert_identical
from watch import wait_until

from pg_cdc_source.protocol.layout import BEFORE, CHANGE_FIELDS

META = [field.name for field in CHANGE_FIELDS]


class Rows:
    """All rows that a sink has got; ``project`` makes of a batch what is kept of it."""

    def __init__(self, projected: Callable[[DataFrame], DataFrame] = lambda batch: batch) -> None:
        self._projected = projected
        self._batches: list[pa.Table] = []

    def __call__(self, batch: DataFrame, _: int) -> None:
        self._batches.append(self._projected(batch).toArrow())

    def count(self, kind: str) -> int:
        return sum(pc.sum(pc.equal(batch["_change_type"], kind)).as_py() or 0 for batch in self._batches)

    def of(self, kind: str, by: str = "id") -> pa.Table:
        """The rows of one kind, ordered."""
        table = pa.concat_tables(self._batches)
        return table.filter(pc.equal(table["_change_type"], kind)).sort_by(by)


@contextmanager
def streaming(
    spark: SparkSession, pg: Session, checkpoint: Path, sink: Rows | list[Rows], **options: str
) -> Iterator[Callable[[str, int], None]]:
    """Run a query; gives a function that waits until its sinks have so many rows of a kind. Drops the slot."""
    sinks = sink if isinstance(sink, list) else [sink]

    def all_sinks(batch: DataFrame, number: int) -> None:
        for one in sinks:
            one(batch, number)

    df = spark.readStream.format("pgcdc").options(slot="values", **options).load()
    query = df.writeStream.foreachBatch(all_sinks).option("checkpointLocation", str(checkpoint)).start()

    def wait(kind: str, rows: int) -> None:
        def here() -> bool:
            if (error := query.exception()) is not None:
                raise error
            return min(one.count(kind) for one in sinks) >= rows

        wait_until(here, 180)
        assert [one.count(kind) for one in sinks] == [rows] * len(sinks)

    try:
        yield wait
    finally:
        query.stop()
        with pg.cursor() as cursor:

            def drop() -> bool:
                cursor.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                    " WHERE slot_name = 'values' AND NOT active"
                )
                cursor.execute("SELECT FROM pg_replication_slots WHERE slot_name = 'values'")
                return bool(cursor.rowcount == 0)

            wait_until(drop)


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def assert_same_values(found: pa.Table, wanted: pa.Table, names: Sequence[str]) -> None:
    assert len(found) == len(wanted) > 0
    for name in names:
        try:
            assert_identical(one_array(found[name]), one_array(wanted[name]))
        except AssertionError as error:
            raise AssertionError(f"column {name}") from error


def old_values(rows: pa.Table) -> pa.Table:
    """The structs of old values as rows."""
    before = one_array(rows[BEFORE])
    assert before.null_count == 0
    return pa.Table.from_arrays(before.flatten(), names=[field.name for field in before.type])
