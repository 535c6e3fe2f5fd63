"""``mirror``: a PostgreSQL schema as tables of a lake, all at one LSN; ``mirror_at`` reads them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Literal

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pg_cdc_source.errors import DefiniteError, OptionError
from pg_cdc_source.lake.apply import OUTCOME_SCHEMA, Task
from pg_cdc_source.lake.delta_rs import read_at
from pg_cdc_source.lake.files import FileWriter
from pg_cdc_source.lake.ledger import Ledger
from pg_cdc_source.lake.sink import Applied, Sink
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.protocol.layout import RUNS_SCHEMA
from pg_cdc_source.spark.edge import short_errors, spark_schema
from pg_cdc_source.spark.register import register

log = logging.getLogger(__name__)

Format = Literal["deltalake"]


def mirror(
    spark: SparkSession,
    *,
    url: str,
    tables: str,
    slot: str,
    target: str,
    checkpoint: str,
    ledger: str | None = None,
    format: Format = "deltalake",
    once: bool = False,
    on_batch: Callable[[Applied], None] | None = None,
    **options: str | int | bool,
) -> StreamingQuery:
    """Keep tables of a lake equal to PostgreSQL's. After each batch all of them stand at the ledger's LSN.

    ``target`` is a template of a path with ``{table}`` and ``{schema}``; ``ledger`` the ledger's path, by default the
    template with ``_pgcdc`` for the table. ``format`` is ``deltalake``: Delta tables, written by delta-rs in Spark's
    tasks. With ``once``, what is there is taken, and the query ends. ``on_batch`` is called after each batch, with
    its row of the ledger and how many rows it had of each table. Other options are those of ``pgcdc``.

    Raises OptionError.
    """
    if format != "deltalake":
        raise OptionError(f"mirror() does not write the format {format!r}", remedy="use deltalake")
    for name in options:
        if name.lower() in _OWN_OPTIONS:
            raise OptionError(f"mirror() sets the option {name} itself", remedy="leave it out")
    targets = Targets.of(_absolute(spark, target), None if ledger is None else _absolute(spark, ledger))
    register(spark)
    reader = spark.readStream.format("pgcdc").options(url=url, tables=tables, slot=slot, **_texts(options))
    rows = reader.options(envelope="arrow", onSchemaChange="emit").load()
    sink = Sink(targets, on_batch)

    def apply(batch: DataFrame, batch_id: int) -> None:
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        if query is None:
            raise DefiniteError("the batch does not say which query it is of")
        try:
            sink.apply(query, batch_id, lambda task: _run(batch, task))
        except Py4JJavaError as error:
            # Without the JVM's stack: when a query is stopped, Spark searches it by a pattern that it is too long for.
            raise PySparkException(error.java_exception.toString()) from None

    writer = rows.writeStream.queryName(f"mirror {slot}").option("checkpointLocation", checkpoint)
    if once:
        writer = writer.trigger(availableNow=True)
    return writer.foreachBatch(apply).start()


_OWN_OPTIONS = frozenset(("envelope", "onschemachange", "dbtable"))


def _absolute(spark: SparkSession, path: str) -> str:
    """A path as Spark understands it: a relative one is in the JVM's directory."""
    if "://" in path:
        return path
    jvm: Any = spark.sparkContext._jvm
    return str(PurePath(jvm.java.lang.System.getProperty("user.dir"), path))


def _texts(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def _run(batch: DataFrame, task: Task) -> list[dict[str, Any]]:
    """Apply a batch in tasks, those of a table's rows in one; what became of each table."""
    parallelism, targets = batch.sparkSession.sparkContext.defaultParallelism, task.targets

    def write_files(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with short_errors():
            yield from FileWriter(targets).take(batches)

    def apply(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with short_errors():
            rows = [row for batch in batches for row in batch.to_pylist()]
            yield pa.RecordBatch.from_pylist(task.outcomes(rows), schema=OUTCOME_SCHEMA)

    written = batch.mapInArrow(write_files, spark_schema(RUNS_SCHEMA))
    outcomes = written.repartition(parallelism, "_table").mapInArrow(apply, spark_schema(OUTCOME_SCHEMA))
    # Not collect(), whose times have lost their zone.
    found: list[dict[str, Any]] = outcomes.toArrow().to_pylist()
    return found


def mirror_at(
    spark: SparkSession,
    ledger: str,
    lsn: int | None = None,
    *,
    format: Format = "deltalake",
) -> dict[str, DataFrame]:
    """The tables of a mirror, all as of one LSN: the newest of the ledger that is not after ``lsn``.

    Tables that were set aside then are left out. Raises OptionError where the ledger has no such row.
    """
    if format != "deltalake":
        raise OptionError(f"mirror_at() does not read the format {format!r}", remedy="use deltalake")
    found = Ledger(_absolute(spark, ledger))
    targets = Targets.of(found.template, found.path)
    row = found.last(lsn)
    if row is None:
        when = "" if lsn is None else f" at or before {lsn}"
        raise OptionError(f"the ledger {ledger} has no row{when}", remedy="wait for the mirror's first batch")
    tables = {}
    for table, version in row.tables.items():
        if table in row.set_aside:
            log.warning("%s is set aside, and left out: %s", table, row.set_aside[table])
            continue
        files, schema = read_at(targets[table], version)
        reader = spark.read.schema(spark_schema(schema))
        tables[table] = reader.parquet(*files) if files else spark.createDataFrame([], spark_schema(schema))
    return tables
