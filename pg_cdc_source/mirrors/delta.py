"""Delta's tables by Spark's SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import pyarrow as pa
import pyarrow.fs as pafs
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrameWriterV2, SparkSession

from pg_cdc_source.lake.bring import Mark
from pg_cdc_source.lake.compaction import SMALL_BYTES
from pg_cdc_source.lake.directories import open_directory, remove_directory
from pg_cdc_source.mirrors.catalog_names import is_path, parts_of
from pg_cdc_source.mirrors.lakes import HOUSEKEEPING_OF_DELTA
from pg_cdc_source.mirrors.sessions import parallelism
from pg_cdc_source.mirrors.spark_commits import RECENT, Commit, read_said
from pg_cdc_source.mirrors.spark_table import SparkTable

_LAST_COMMIT = "spark.databricks.delta.lastCommitVersionInSession"
_STATE_TASKS = "spark.databricks.delta.snapshotPartitions"
# The log has a table's first commit before the catalog has the table.
_NOT_EMPTY = "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION"
# The log's directories are there before that: at a path they are a table to the one who creates it, and none to the one
# who reads it.
_EXISTS = "TABLE_OR_VIEW_ALREADY_EXISTS"
# Of one batch; the parts of a version for the batch and for the step.
_MOST_STEPS = 1 << 20
_SMALL = "spark.databricks.delta.optimize.minFileSize"


class DeltaTable(SparkTable):
    """A table that Delta Lake's jar, or Databricks, writes."""

    provider = "delta"
    properties: ClassVar = {
        # Columns are renamed and dropped without their files being written anew.
        "delta.columnMapping.mode": "name",
        "delta.enableDeletionVectors": "true",
        "delta.enableTypeWidening": "true",
        # Delta enables it by itself for the columns that a table begins with, and not for one that is added.
        "delta.feature.timestampNtz": "supported",
    }
    # A log has a column _change_type, which Delta keeps for its own feed. A cluster may enable that for all tables.
    properties_of_logs: ClassVar = {"delta.enableChangeDataFeed": "false"}
    housekeeping = HOUSEKEEPING_OF_DELTA | {"CLUSTER BY"}

    @classmethod
    def configure(cls, session: SparkSession, template: str) -> None:
        # By default each commit reads the table's state in 50 tasks.
        if session.conf.get(_STATE_TASKS, None) is None:
            session.conf.set(_STATE_TASKS, parallelism(session))
        # By default files of up to 1 GB are small to OPTIMIZE.
        if session.conf.get(_SMALL, None) is None:
            session.conf.set(_SMALL, SMALL_BYTES)

    def present(self, properties: Mapping[str, str]) -> int | None:
        return self.commits(1)[0].version

    def commits(self, limit: int | None) -> list[Commit]:
        return _commits(self._spark, self._name, limit)

    @classmethod
    def is_of(cls, spark: SparkSession, name: str, version: int, mark: Mark) -> bool:
        behind = _commits(spark, name, 1)[0].version - version
        if behind < 0:
            return False
        commits = (commit for commit in _commits(spark, name, behind + RECENT) if commit.version <= version)
        # Behind it there may be some of others, who kept house. Where the log has lost them all, so it has the version.
        said = next((commit.said for commit in commits if commit.said), None)
        return said is None or (said["query"] == mark.query and said["batch"] <= mark.batch)

    def committed(self) -> int | None:
        found = self._spark.conf.get(_LAST_COMMIT, None)
        return None if found is None else int(found)

    def follows(self, version: int, before: int) -> bool:
        return version == before + 1

    def sign(self, text: str, number: int | None) -> None:
        conf = self._spark.conf
        conf.unset(_LAST_COMMIT)
        conf.set("spark.databricks.delta.commitInfo.userMetadata", text)
        # Of two drivers that do the same step at the same time, one does nothing: Delta passes over what has a version
        # that the application has had. A table's log keeps all applications that there ever were, so that the steps of
        # all batches are one. Each has a greater number than all that the table has, and is never passed over where one
        # driver alone applies the batch.
        if number is not None:
            conf.set("spark.databricks.delta.write.txnAppId", f"{self._mark.query}/steps")
            conf.set("spark.databricks.delta.write.txnVersion", self._mark.batch * _MOST_STEPS + number)
        else:
            conf.unset("spark.databricks.delta.write.txnAppId")
            conf.unset("spark.databricks.delta.write.txnVersion")

    def only_says(self, operation: str) -> bool:
        if operation not in ("CHANGE COLUMN", "CHANGE COLUMNS"):
            return False
        columns = self._spark.table(self._name).schema
        said = {field.name: field.dataType for field in self._columns.schema}
        return {f.name: f.dataType for f in columns} == said and all(field.nullable for field in columns)

    def age(self, version: int | None) -> int:
        return version or 0

    @classmethod
    def create(cls, spark: SparkSession, writer: DataFrameWriterV2, has_begun: Callable[[str], bool]) -> None:
        try:
            writer.create()
        except AnalysisException as error:
            given = error.getMessageParameters() or {}
            if error.getCondition() == _NOT_EMPTY:
                location, is_ours = given.get("tableLocation", ""), has_begun
            elif error.getCondition() == _EXISTS:
                location, is_ours = _path(given.get("relationName", "")), _is_bare
            else:
                raise
            if not is_ours(location):
                raise
            remove_directory(location)
            writer.create()

    @classmethod
    def write_together(cls, session: SparkSession, name: str, text: str) -> None:
        # The session says the text.
        session.sql(f"OPTIMIZE {name}").collect()


def _path(name: str) -> str:
    """The path of a table that has no other name; nothing where it has one."""
    parts = parts_of(name) if name else []
    return parts[1] if len(parts) == 2 and parts[0].lower() == DeltaTable.provider and is_path(parts[1]) else ""


def _is_bare(location: str) -> bool:
    """Whether a place has no files but, in a log without a commit, what was to become the first one."""
    if not location:
        return False
    try:
        filesystem, root = open_directory(location)
        found = filesystem.get_file_info(pafs.FileSelector(root))
        if [info.base_name for info in found] != ["_delta_log"]:
            return False
        log = filesystem.get_file_info(pafs.FileSelector(f"{root}/_delta_log", recursive=True))
    except (OSError, pa.ArrowException):
        # Arrow may have no file system for it, and then nothing is known of it.
        return False
    return not any(info.is_file and not info.base_name.startswith(".") for info in log)


def _commits(spark: SparkSession, name: str, limit: int | None) -> list[Commit]:
    bound = "" if limit is None else f" LIMIT {limit}"
    rows = spark.sql(f"DESCRIBE HISTORY {name}{bound}").select("version", "operation", "userMetadata")
    return [Commit(at, at - 1, operation, read_said(said)) for at, operation, said in rows.collect()]
