"""The format ``deltalake``: Delta tables at paths, written by delta-rs in Spark's tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from pg_cdc_source.lake.bring import Mark
from pg_cdc_source.lake.first_files import FirstFiles
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.shape_of_table import require_shape
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import Start
from pg_cdc_source.mirrors.delta_rs import DeltaRsTask, read_at
from pg_cdc_source.mirrors.delta_rs_commits import is_of
from pg_cdc_source.mirrors.delta_rs_ledger import DeltaRsLedger
from pg_cdc_source.mirrors.lakes import Outcome, run_task
from pg_cdc_source.spark.edge import short_errors, spark_schema

# An object store takes tens of milliseconds for each answer, and a table several answers.
_LOOKS_AT_ONCE = 16
# Whatever the session says: it knows nothing of who has written the files, and asks for them when the rows are read.
_READ_AS_THEY_ARE = {
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
}


class DeltaRsLake:
    """A table's changes of a batch are merged by one task."""

    def __init__(self, spark: SparkSession, targets: Targets, shapes: Shapes, *, compacts: bool) -> None:
        self._spark = spark
        self._targets = targets
        self._shapes = shapes
        self._compacts = compacts
        self.ledger = DeltaRsLedger(targets.ledger, compacts=compacts)

    @property
    def first_files(self) -> FirstFiles:
        return FirstFiles(targets=self._targets, shapes=self._shapes)

    def run(self, batch: DataFrame, start: Start) -> list[Outcome]:
        task = DeltaRsTask(self._targets, start, self._shapes, self._compacts)
        return run_task(batch, task, self.first_files)

    def require_shapes(self, tables: Iterable[str]) -> None:
        def look(table: str) -> None:
            path = self._targets[table]
            if DeltaTable.is_deltatable(path):
                properties = DeltaTable(path).metadata().configuration
                require_shape(path, properties, self._shapes[table])

        with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
            list(pool.map(look, tables))

    def is_of(self, table: str, version: int, mark: Mark) -> bool:
        return is_of(self._targets[table], version, mark)

    def try_to_read(self, table: str) -> None:
        path = self._targets[table]

        def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            # As tasks read it. Spark itself may have no file system for the place.
            with short_errors():
                read_at(path)
            yield from batches

        self._spark.range(0, 1, 1, 1).mapInArrow(look, "id long").collect()

    def read(self, table: str, version: int) -> DataFrame:
        files, schema = read_at(self._targets[table], version)
        reader = self._spark.read.schema(spark_schema(schema)).options(**_READ_AS_THEY_ARE)
        return reader.parquet(*files) if files else self._spark.createDataFrame([], spark_schema(schema))
