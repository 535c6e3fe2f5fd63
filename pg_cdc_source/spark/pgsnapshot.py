"""``spark.read.format("pgsnapshot")``: the edge to Spark's Python data source interface."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from pg_cdc_source.errors import DefiniteError, OptionError, PgCdcError
from pg_cdc_source.options.parse import parse_snapshot_options
from pg_cdc_source.snapshot.reader import read_piece
from pg_cdc_source.snapshot.scan import Piece, Plan, Source, make_plan, plan_pieces
from pg_cdc_source.spark.worker import freeze_modules, small_task


@dataclass
class PiecePartition(InputPartition):
    """One partition of a scan. Only partitions carry what planning finds: the reader is pickled before it."""

    source: Source
    piece: Piece


class PgSnapshotDataSource(DataSource):
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
        return _spark_schema(self._planned())

    def reader(self, schema: StructType) -> DataSourceReader:
        plan = self._planned()
        own = _spark_schema(plan)
        if schema != own:
            raise OptionError(
                f"the schema given to spark.read.schema() is not the one of {plan.what}: {own.simpleString()}",
                remedy="leave .schema() out; use the options columns, asString and numericAs, and cast in Spark",
            )
        return PgSnapshotReader(plan)

    def _planned(self) -> Plan:
        # Spark pickles the source after schema(), so the plan is made once per load.
        if self._plan is None:
            with short_errors():
                self._plan = make_plan(self._options)
        return self._plan


class PgSnapshotReader(DataSourceReader):
    """Plans the partitions of one scan on the driver and reads each on an executor."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def partitions(self) -> list[InputPartition]:
        freeze_modules()
        with short_errors():
            source, pieces = plan_pieces(self._plan)
        return [PiecePartition(source, piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PiecePartition)
        with small_task(), short_errors():
            yield from read_piece(self._plan, partition.source, partition.piece, execution())


@contextmanager
def short_errors() -> Iterator[None]:
    """Leave out the frames below this edge: Spark shows users the whole stack, and the text says all there is."""
    try:
        yield
    except PgCdcError as error:
        # The same object would get its frames back.
        raise copy.copy(error) from None


def execution() -> str:
    """What all tasks of one action have in common: the SQL execution's id, or under ``df.rdd`` the stage's."""
    context = TaskContext.get()
    if context is None:
        raise DefiniteError("a partition was read outside of a Spark task")
    return context.getLocalProperty("spark.sql.execution.id") or f"r{context.stageId()}"


def _spark_schema(plan: Plan) -> StructType:
    return from_arrow_schema(plan.arrow_schema(), prefer_timestamp_ntz=True)
