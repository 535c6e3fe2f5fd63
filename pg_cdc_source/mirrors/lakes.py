"""The formats of a mirror: how a batch is applied in each, and how a table is read as of a version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from pg_cdc_source.lake.bring import Mark
from pg_cdc_source.lake.files import FileWriter
from pg_cdc_source.lake.first_files import FirstFiles
from pg_cdc_source.lake.ledger import Ledger
from pg_cdc_source.lake.tasks import OUTCOME_SCHEMA, Start, Task
from pg_cdc_source.mirrors.sessions import parallelism
from pg_cdc_source.protocol.layout import RUNS_SCHEMA
from pg_cdc_source.spark.copies import Sealed
from pg_cdc_source.spark.edge import short_errors, spark_schema
from pg_cdc_source.spark.worker_tuning import small_task
from pg_cdc_source.values.arrow import in_utc

Outcome = dict[str, Any]

# From 4.2 on, Spark gives up a job whose map task has other rows when it runs again, as where an executor is lost. The
# files that tasks write here have new names then, and whoever gets their rows takes all of them or none.
CHECKSUMS = "spark.sql.shuffle.orderIndependentChecksum.enabled"

# What others may do to a Delta table, by the names that its log has for it: the rows stay the same.
HOUSEKEEPING_OF_DELTA = frozenset(
    ("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "REORG", "COMPUTE STATS")
)


class Lake(Protocol):
    """Tables and a ledger in one format."""

    @property
    def ledger(self) -> Ledger:
        """The ledger."""

    @property
    def first_files(self) -> FirstFiles:
        """Where tasks write rows of a snapshot."""

    def run(self, batch: DataFrame, start: Start) -> Sequence[Outcome]:
        """Apply a batch; what became of each table, in rows of ``OUTCOME_SCHEMA``."""

    def require_shapes(self, tables: Iterable[str]) -> None:
        """Raise OptionError where a table that is there keeps something else than it is to keep."""

    def read(self, table: str, version: int) -> DataFrame:
        """The table as it was at a version."""

    def try_to_read(self, table: str) -> None:
        """Raise where tasks cannot read the table."""

    def is_of(self, table: str, version: int, mark: Mark) -> bool:
        """Whether a version that the ledger's row of a batch has is still that one.

        Where the lake's table was moved away, another one has its place, and may have the number.
        """


@dataclass(frozen=True)
class _ToDo(Sealed):
    """What tasks are given. An executor may have another version of the package."""

    task: Task
    files: FirstFiles


def run_task(batch: DataFrame, task: Task, files: FirstFiles) -> list[Outcome]:
    """Run a task on all rows of a batch, those of one table together; what became of each table.

    ``files``: where rows of a snapshot go that its own tasks have not written.
    """

    todo = _ToDo(task, files)

    def write_files(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with small_task(), short_errors():
            yield from FileWriter(todo.files).take(batches)

    def apply(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with small_task(), short_errors():
            rows = [row for batch in batches for row in in_utc(batch).to_pylist()]
            yield pa.RecordBatch.from_pylist(todo.task.outcomes(rows), schema=OUTCOME_SCHEMA)

    conf = batch.sparkSession.conf
    if conf.isModifiable(CHECKSUMS):
        conf.set(CHECKSUMS, "false")
    written = batch.mapInArrow(write_files, spark_schema(RUNS_SCHEMA))
    outcomes = written.repartition(parallelism(batch.sparkSession), "_table").mapInArrow(
        apply, spark_schema(OUTCOME_SCHEMA)
    )
    # Not collect(), whose times have lost their zone.
    found: list[Outcome] = in_utc(outcomes.toArrow()).to_pylist()
    return found
