"""``format("bench_numpy_alone")``: ``pgsnapshot`` without the accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pg_cdc_source.spark.pgsnapshot import PgSnapshotDataSource, PgSnapshotReader
from pg_cdc_source.values import native


class NumpyAloneSource(PgSnapshotDataSource):
    """``pgsnapshot``, decoding with NumPy alone."""

    @classmethod
    def name(cls) -> str:
        return "bench_numpy_alone"

    def reader(self, schema: StructType) -> DataSourceReader:
        super().reader(schema)
        plan, planned = self._loaded()
        return NumpyAloneReader(plan, self._options, planned)


class NumpyAloneReader(PgSnapshotReader):
    """Turns the accelerator off while a partition is read, because the worker reads other partitions later."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with numpy_alone():
            yield from super().read(partition)


@contextmanager
def numpy_alone() -> Iterator[None]:
    library, native.LIBRARY = native.LIBRARY, None
    try:
        yield
    finally:
        native.LIBRARY = library
