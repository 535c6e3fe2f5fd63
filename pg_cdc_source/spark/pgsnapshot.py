"""``spark.read.format("pgsnapshot")``: the edge to Spark's Python data source interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition
from pyspark.sql.types import StructType

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.snapshot_options import SnapshotOptions, parse_snapshot_options
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import Plan, ScanRange, make_plan
from pg_cdc_source.snapshot.source import Source, plan_ranges
from pg_cdc_source.spark.copies import Sealed, SealedClass
from pg_cdc_source.spark.edge import execution, short_errors, spark_schema
from pg_cdc_source.spark.worker_tuning import small_task, tune_process


@dataclass
class RangePartition(Sealed, InputPartition):
    """One range of a scan. It carries what planning found: Spark pickles the reader before planning."""

    source: Source
    range: ScanRange


class PgSnapshotDataSource(Sealed, DataSource, metaclass=SealedClass):
    """Read a PostgreSQL table at one consistent point, in parallel."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        with short_errors():
            self._options = parse_snapshot_options(options)
        self._plan: Plan | None = None

    @classmethod
    def name(cls) -> str:
        return "pgsnapshot"

    def schema(self) -> StructType:
        tune_process()
        return spark_schema(self._planned().arrow_schema())

    def reader(self, schema: StructType) -> DataSourceReader:
        plan = self._planned()
        own = spark_schema(plan.arrow_schema())
        if schema != own:
            raise OptionError(
                f"the schema given to spark.read.schema() is not the one of {plan.what}: {own.simpleString()}",
                remedy="leave .schema() out; use the options columns, asString and numericAs, and cast in Spark",
            )
        return PgSnapshotReader(plan, self._options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        raise OptionError("pgsnapshot only reads", remedy='write with Spark\'s format("jdbc")')

    def _planned(self) -> Plan:
        # Spark pickles the source after schema(), so the plan is made once per load.
        if self._plan is None:
            with short_errors():
                self._plan = make_plan(self._options)
        return self._plan


class PgSnapshotReader(Sealed, DataSourceReader):
    """Plans the ranges of one scan on the driver and reads each on an executor."""

    def __init__(self, plan: Plan, options: SnapshotOptions) -> None:
        self._plan = plan
        self._options = options

    def partitions(self) -> list[InputPartition]:
        tune_process()
        with short_errors():
            source, ranges = plan_ranges(self._plan, self._options)
        return [RangePartition(source, scan_range) for scan_range in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        with small_task(), short_errors():
            yield from read_range(self._plan, partition.source, partition.range, execution())
