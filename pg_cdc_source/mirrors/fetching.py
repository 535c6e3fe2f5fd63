"""Final rows that need values of the lake's table: a task of its own puts them together."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from pg_cdc_source.errors import error_of
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.mirrors.staging import StagedSegment, ask_for_rows, with_fetched_rows
from pg_cdc_source.spark.edge import short_errors


def in_a_task(spark: SparkSession, segment: StagedSegment, fetched: str, shape: Shape) -> StagedSegment:
    """Have a task stage the final rows of a segment; ``fetched`` is where the rows of the lake's table are.

    Raises SchemaChangedError.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with short_errors():
            for batch in batches:
                yield pa.RecordBatch.from_pydict(
                    {"said": [with_fetched_rows(text.as_py()) for text in batch.column(0)]}
                )

    asked = spark.createDataFrame([(ask_for_rows(segment, fetched, shape),)], "said string").coalesce(1)
    (row,) = asked.mapInArrow(run, "said string").collect()
    said = json.loads(row.said)
    if "error" in said:
        raise error_of(*said["error"])
    return StagedSegment.read(said["segment"])
