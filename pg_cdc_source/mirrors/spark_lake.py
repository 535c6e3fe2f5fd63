"""The formats ``delta`` and ``iceberg``: tasks stage a batch, and Spark's own MERGE INTO takes it, tables side by side.

Each table is written in a session of its own, because what commits say of their batch is a setting of the session.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileType
from pyspark import inheritable_thread_target
from pyspark.errors import AnalysisException, PySparkException, UnsupportedOperationException
from pyspark.sql import DataFrame, SparkSession

from pg_cdc_source.errors import RESNAPSHOT, DefiniteError, ForeignWriterError, PgCdcError, TransientError, short_text
from pg_cdc_source.lake.bring import Mark, Patience, Work, bring
from pg_cdc_source.lake.directories import open_directory, remove_directory
from pg_cdc_source.lake.first_files import FirstFiles
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.shape_of_table import require_shape
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import OF_ANY_TABLE, Start
from pg_cdc_source.mirrors.catalog_names import ledger_in_sql, table_in_sql
from pg_cdc_source.mirrors.catalog_tables import read_properties, refresh
from pg_cdc_source.mirrors.lakes import Outcome, run_task
from pg_cdc_source.mirrors.sessions import another, end, errors_of_jvm, is_connect, parallelism
from pg_cdc_source.mirrors.spark_ledger import SparkLedger
from pg_cdc_source.mirrors.spark_table import SparkTable
from pg_cdc_source.mirrors.staging import StagedSegment, StagingTask, read_work
from pg_cdc_source.postgres.backoff import Backoff

# Brings a table to a version, and may do so more than once.
Retrying = Callable[[Callable[[], int | None]], int | None]

log = logging.getLogger(__name__)

# What Spark does by default, for the values are PostgreSQL's whatever the user's session has for queries of its own.
_SETTINGS = {
    # With these Spark takes ${…} in a statement, or what stands behind a backslash, for something else. Statements have
    # texts of users' keys in them.
    "spark.sql.variable.substitute": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
    # With this, a name between backticks is a pattern of names.
    "spark.sql.parser.quotedRegexColumnNames": "false",
    # Dates before 1900 by the calendar of Spark 2, and times without their microseconds.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    # Spark's own default is INT96, whose nanoseconds not all times fit.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Types by names of SQL, and those of files.
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    "spark.sql.parquet.binaryAsString": "false",
    # Values that do not fit are NULL, or cut.
    "spark.sql.ansi.enabled": "true",
    "spark.sql.storeAssignmentPolicy": "ANSI",
    # Rows that stay where all are replaced, and files that are passed over.
    "spark.sql.sources.partitionOverwriteMode": "STATIC",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
_OF_CATALOGS = ("spark.sql.catalog.", "spark.sql.iceberg.")
_CANCELLED = "SPARK_JOB_CANCELLED"
_ONCE = Backoff(0.0, attempts=1)


class _Sign:
    """A file that stands beside what a batch has staged: where it is gone, so is that."""

    def __init__(self, directory: str) -> None:
        self._filesystem, root = open_directory(directory)
        self._path = f"{root}/batch-{uuid.uuid4()}"
        self._filesystem.open_output_stream(self._path).close()

    def require(self, batch_id: int) -> None:
        """Raise DefiniteError where another driver of this mirror has removed it: what failed is no table's fault."""
        if self._filesystem.get_file_info(self._path).type == FileType.NotFound:
            raise DefiniteError(
                f"another driver of this mirror applies batch {batch_id} or a later one, and has removed what this one "
                "has staged",
                remedy="let one driver run with a checkpoint; start the query again: it goes on with this batch",
            )


class SparkLake:
    """Tables in Spark's catalogs. A batch is staged below ``staging``, a directory that executors reach."""

    def __init__(
        self,
        spark: SparkSession,
        targets: Targets,
        kind: type[SparkTable],
        staging: str,
        shapes: Shapes,
        *,
        compacts: bool,
    ) -> None:
        self._spark = spark
        self._targets = targets
        self._shapes = shapes
        self._kind = kind
        self._staging = staging
        self._compacts = compacts
        name = ledger_in_sql(targets, kind.provider)
        compact = partial(self._compact_ledger, name) if compacts else None
        self.ledger = SparkLedger(spark, name, kind.provider, kind.upkeep, kind.create, compact)
        self._sessions: SimpleQueue[SparkSession] = SimpleQueue()

    @property
    def first_files(self) -> FirstFiles:
        return FirstFiles(directory=self._staging, shapes=self._shapes)

    def try_to_read(self, table: str) -> None:
        name = self._name(table)
        refresh(self._spark, name, self._kind.provider)
        self._spark.table(name).head()

    def read(self, table: str, version: int) -> DataFrame:
        name = self._name(table)
        refresh(self._spark, name, self._kind.provider)
        return self._spark.sql(f"SELECT * FROM {name} VERSION AS OF {version}")

    def is_of(self, table: str, version: int, mark: Mark) -> bool:
        name = self._name(table)
        refresh(self._spark, name, self._kind.provider)
        return read_properties(self._spark, name) is not None and self._kind.is_of(self._spark, name, version, mark)

    def _name(self, table: str) -> str:
        return table_in_sql(self._targets, table, self._kind.provider)

    def require_shapes(self, tables: Iterable[str]) -> None:
        def look(table: str) -> None:
            properties = read_properties(self._spark, self._name(table))
            if properties is not None:
                require_shape(self._name(table), properties, self._shapes[table])

        with ThreadPoolExecutor(parallelism(self._spark)) as pool:
            list(pool.map(look, tables))

    def run(self, batch: DataFrame, start: Start) -> list[Outcome]:
        # What a batch that a crash has ended has left goes first.
        remove_directory(self._staging)
        sign = _Sign(self._staging)
        task = StagingTask(self._targets, start, self._shapes, self._staging)
        outcomes = run_task(batch, task, self.first_files)
        count = min(len(outcomes), parallelism(self._spark)) or 1
        try:
            with ThreadPoolExecutor(count, thread_name_prefix="pgcdc-mirror") as pool:
                patience = Patience()
                bring = self._inheriting(lambda outcome: self._apply(outcome, start, patience.retrying))
                list(pool.map(bring, outcomes))
                # What a catalog has refused for a while it may take by now, as what came behind it.
                again = [outcome for outcome in outcomes if (outcome["error"] or "").startswith(OF_ANY_TABLE)]
                list(pool.map(self._inheriting(lambda outcome: self._apply(outcome, start, _ONCE.retrying)), again))
        finally:
            self._end_sessions()
        if any(outcome["error"] is not None for outcome in outcomes):
            sign.require(start.mark.batch)
        remove_directory(self._staging)
        return outcomes

    def _inheriting(self, function: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
        """``function`` for a thread whose jobs are this thread's."""
        wrap: Any = inheritable_thread_target(self._spark)
        # With PYSPARK_PIN_THREAD=false, Spark gives back what it is given.
        return function if wrap is self._spark else wrap(function)

    def _compact_ledger(self, name: str) -> None:
        session = self._session()
        try:
            self._kind.write_together(session, name, "ledger")
        finally:
            self._sessions.put(session)
            self._end_sessions()

    def _end_sessions(self) -> None:
        # Spark Connect's server forgets a session that nobody has used for an hour.
        while is_connect(self._spark) and not self._sessions.empty():
            try:
                end(self._sessions.get())
            except PySparkException as error:
                log.warning("a session of Spark Connect's could not be ended: %s", short_text(error))

    def _apply(self, outcome: Outcome, start: Start, retrying: Retrying) -> None:
        if outcome["staged"] is None:
            return
        outcome["error"] = None
        table, work = outcome["table"], read_work(outcome["staged"])
        session = self._session()
        try:
            outcome["version"] = retrying(lambda: self._bring(session, table, work, start))
        except PgCdcError as error:
            # A metastore that cannot be reached looks like SQL that is wrong.
            is_of_spark = isinstance(error.__cause__, AnalysisException)
            outcome["error"] = f"Spark: {error.__cause__}" if is_of_spark else str(error)
            if is_of_spark and (altered := self._find_altered(session, table, start)) is not None:
                outcome["error"] = str(altered)
        finally:
            self._sessions.put(session)

    def _find_altered(self, session: SparkSession, table: str, start: Start) -> ForeignWriterError | None:
        """The error for a table that lacks a column which it says it has; None for another one."""
        expected = start.versions.get(table)
        try:
            self._kind(session, self._name(table), table, start.mark, expected, self._shapes[table]).require_columns()
        except ForeignWriterError as error:
            return error
        except (PySparkException, OSError, pa.ArrowException, *errors_of_jvm(session)) as error:
            # What keeps it from being read keeps it from being written, which is said.
            log.debug("%s cannot be looked at: %s", table, error)
        return None

    def _bring(self, session: SparkSession, table: str, work: Work[StagedSegment], start: Start) -> int | None:
        expected, again = start.versions.get(table), table in start.set_aside
        try:
            lake = self._kind(session, self._name(table), table, start.mark, expected, self._shapes[table])
            return bring(table, lake, work, expected, again=again, compacts=self._compacts)
        except UnsupportedOperationException as error:
            what = f"{table} could not be written: {short_text(error)}"
            raise DefiniteError(what, remedy=f"see what the error says; then {RESNAPSHOT}") from error
        except (PySparkException, OSError, pa.ArrowException, *errors_of_jvm(session)) as error:
            # A query that is stopped cancels its jobs.
            if _CANCELLED in str(error):
                raise
            # Whoever rewrites files at the same time makes a commit fail; object stores have bad moments. What is done
            # already is found by the next attempt.
            what = f"{table} could not be written: {short_text(error)}"
            log.warning("%s", what)
            remedy = f"see what the error says; then {RESNAPSHOT}"
            raise TransientError(what, remedy=remedy) from error

    def _session(self) -> SparkSession:
        """A session that no other table has now, with the settings of the query's that change no value."""
        with contextlib.suppress(Empty):
            return self._sessions.get_nowait()
        session = another(self._spark)
        try:
            self._configure(session)
        except BaseException:
            # Nobody else would.
            if is_connect(session):
                end(session)
            raise
        return session

    def _configure(self, session: SparkSession) -> None:
        ours = session.conf
        present = ours.getAll
        for key, value in self._spark.conf.getAll.items():
            # Spark takes what it does not know for something that may not be set, as catalogs and what they read.
            is_sql = key.startswith(("spark.sql.", "spark.databricks."))
            may_be_set = key.startswith(_OF_CATALOGS) or ours.isModifiable(key)
            if is_sql and present.get(key) != value and may_be_set:
                ours.set(key, value)
        for key, value in _SETTINGS.items():
            ours.set(key, value)
        self._kind.configure(session, self._targets.template)
