"""Iceberg's tables in a driver with a JVM: by Iceberg's own objects where SQL takes long, or has no words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pg_cdc_source.lake.bring import Step
from pg_cdc_source.lake.columns import MirroredLayout, read_layout
from pg_cdc_source.lake.compaction import SMALL_BYTES
from pg_cdc_source.lake.parts import Files
from pg_cdc_source.mirrors.catalog_names import backquoted
from pg_cdc_source.mirrors.catalog_tables import catalog_of
from pg_cdc_source.mirrors.column_changes import Columns
from pg_cdc_source.mirrors.iceberg import SAID, IcebergTable
from pg_cdc_source.mirrors.iceberg_files import has_columns, take_over
from pg_cdc_source.mirrors.merge_sql import literal
from pg_cdc_source.mirrors.spark_commits import ANEW_STEP, RECENT


class IcebergTableOfJvm(IcebergTable):
    """A table of an Iceberg catalog in the JVM of the driver."""

    def committed(self) -> int | None:
        table = _loaded(self._spark, self._name)
        snapshot = table.currentSnapshot()
        for _ in range(RECENT):
            if snapshot is None:
                break
            if snapshot.summary().get(SAID) == self._text:
                return int(snapshot.snapshotId())
            snapshot = None if snapshot.parentId() is None else table.snapshot(snapshot.parentId())
        return None

    def follows(self, version: int, before: int) -> bool:
        table = _loaded(self._spark, self._name)
        found, parent = table.snapshot(version), table.snapshot(before)
        if found is None or parent is None:
            return False
        return (found.parentId(), found.schemaId()) == (before, parent.schemaId())

    def alters(self, version: int, before: int) -> bool:
        table = _loaded(self._spark, self._name)
        was, now = (_numbers(table, at) for at in (before, version))
        # One of them may have expired since they were listed.
        return bool(was and now) and any(now.get(name, number) != number for name, number in was.items())

    def age(self, version: int | None) -> int:
        found = None if version is None else _loaded(self._spark, self._name).snapshot(version)
        return 0 if found is None else int(found.sequenceNumber())

    def prepare(self, layout: MirroredLayout, fills: Mapping[int, str | None], *, anew: bool) -> None:
        super().prepare(layout, fills, anew=anew)
        assert self._said is not None
        if self._version is None and self.present(self._said) is None:
            # It has a version before it has rows.
            self._signed(ANEW_STEP)
            self._append_nothing()
            self._note_commit()

    def _append_nothing(self) -> None:
        append = _loaded(self._spark, self._name).newAppend()
        append.set(SAID, self._text)
        append.commit()

    def _write_empty(self, schema: StructType, properties: Mapping[str, str], *, replaces: bool) -> None:
        if replaces:
            super()._write_empty(schema, properties, replaces=True)
            return
        # A write without rows takes a job of Spark's, and half a second.
        columns = ", ".join(f"{backquoted(field.name)} {field.dataType.simpleString()}" for field in schema)
        given = ", ".join(f"{literal(key)} = {literal(value)}" for key, value in properties.items())
        self._spark.sql(f"CREATE TABLE {self._name} ({columns}) USING iceberg TBLPROPERTIES ({given})")

    def add_files(self, step: Step, part: Files) -> None:
        """Take over files as they are, where the table has just their columns; else have their rows written."""
        columns = self._columns
        written = {file["layout"] for file in part.files}
        is_as_written = all(Columns.of(read_layout(text), self._shape) == columns for text in written)
        if is_as_written and not part.again and not self._shape.has_variants:
            table = _loaded(self._spark, self._name)
            said = {SAID: self._signed(step.name, is_last=step.is_last)}
            if has_columns(table, columns.schema.names) and take_over(self._spark, table, part.files, said):
                self._note_commit()
                return
        super().add_files(step, part)

    @classmethod
    def write_together(cls, session: SparkSession, name: str, text: str) -> None:
        # CALL … rewrite_data_files cannot have its commits say anything.
        jvm: Any = session._jvm
        # Its threads take what they read from the session that is active in this one, which may have none: then they
        # find no catalog, unless an action before has left one.
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(session._jsparkSession)
        actions = jvm.org.apache.iceberg.spark.actions.SparkActions.get(session._jsparkSession)
        for action in ("rewriteDataFiles", "rewritePositionDeletes"):
            rewrite = getattr(actions, action)(_loaded(session, name))
            rewrite.option("min-file-size-bytes", str(SMALL_BYTES)).snapshotProperty(SAID, text).execute()


def _numbers(table: Any, version: int) -> dict[str, int]:
    """Iceberg's numbers of the columns that a snapshot has, by their names, which are the same in any case.

    Empty where there is no such snapshot any more.
    """
    snapshot = table.snapshot(version)
    if snapshot is None:
        return {}
    schema = table.schemas().get(snapshot.schemaId())
    return {column.name().lower(): column.fieldId() for column in schema.columns()}


def _loaded(session: SparkSession, name: str) -> Any:
    """Iceberg's own object of a table, as the table is now."""
    jvm: Any = session._jvm
    # The default catalog would be that of the thread's session, which may be another one.
    catalog, rest = catalog_of(session, name)
    name = f"{backquoted(catalog)}.{rest}"
    return jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(session._jsparkSession, name)
