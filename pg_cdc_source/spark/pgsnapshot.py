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
from pg_cdc_source.snapshot.scan import Plan, ScanRange
from pg_cdc_source.snapshot.source import PlannedRanges, Source, plan_load, plan_ranges
from pg_cdc_source.spark.copies import Sealed, SealedClass, SealedPartition
from pg_cdc_source.spark.edge import execution, short_errors, spark_schema
from pg_cdc_source.spark.worker_tuning import small_task, tune_process


@dataclass
class RangePartition(SealedPartition):
    """One range of a scan. It carries what planning found: Spark pickles the reader before planning."""

    source: Source
    range: ScanRange


class PgSnapshotDataSource(Sealed, DataSource, metaclass=SealedClass):
    """Read a PostgreSQL table at one consistent point, in parallel."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        with short_errors():
            self._options = parse_snapshot_options(options)
        self._load: tuple[Plan, PlannedRanges | None] | None = None

    @classmethod
    def name(cls) -> str:
        return "pgsnapshot"

    def schema(self) -> StructType:
        tune_process()
        plan, _ = self._loaded()
        return spark_schema(plan.arrow_schema())

    def reader(self, schema: StructType) -> DataSourceReader:
        plan, planned = self._loaded()
        own = spark_schema(plan.arrow_schema())
        if schema != own:
            raise OptionError(
                f"the schema given to spark.read.schema() is not the one of {plan.what}: {own.simpleString()}",
                remedy="leave .schema() out; use the options columns, asString and numericAs, and cast in Spark",
            )
        return PgSnapshotReader(plan, self._options, planned)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        raise OptionError("pgsnapshot only reads", remedy='write with Spark\'s format("jdbc")')

    def _loaded(self) -> tuple[Plan, PlannedRanges | None]:
        # Spark pickles the source after schema(), so the plan is made once per load.
        if self._load is None:
            with short_errors():
                self._load = plan_load(self._options)
        return self._load


class PgSnapshotReader(Sealed, DataSourceReader):
    """Plans the ranges of one scan on the driver and reads each on an executor."""

    def __init__(self, plan: Plan, options: SnapshotOptions, planned: PlannedRanges | None) -> None:
        self._plan = plan
        self._options = options
        self._planned = planned

    def __getstate__(self) -> dict[str, object]:
        # Each task gets its own range, and none needs all of them.
        return {**vars(self), "_planned": None}

    def partitions(self) -> list[InputPartition]:
        tune_process()
        with short_errors():
            source, ranges = plan_ranges(self._plan, self._options, self._planned)
        return [RangePartition(source, scan_range) for scan_range in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        with small_task(), short_errors():
            yield from read_range(self._plan, partition.source, partition.range, execution())
