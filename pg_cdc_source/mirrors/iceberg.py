"""Iceberg's tables by Spark's SQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pg_cdc_source.lake.bring import Step
from pg_cdc_source.lake.columns import MirroredLayout, read_layout
from pg_cdc_source.lake.compaction import SMALL_BYTES
from pg_cdc_source.lake.parts import Files
from pg_cdc_source.mirrors.catalog_names import quoted
from pg_cdc_source.mirrors.catalog_tables import read_properties
from pg_cdc_source.mirrors.column_changes import Columns
from pg_cdc_source.mirrors.iceberg_files import has_columns, take_over
from pg_cdc_source.mirrors.spark_table import ANEW_STEP, COLUMNS, RECENT, Commit, SparkTable, literal, read_said

_SAID = "pgcdc"


class IcebergTable(SparkTable):
    """A table of an Iceberg catalog. Its versions are ids of snapshots."""

    provider = "iceberg"
    properties: ClassVar = {
        "format-version": "2",
        "write.merge.mode": "merge-on-read",
        "write.update.mode": "merge-on-read",
        "write.delete.mode": "merge-on-read",
    }
    properties_of_variants: ClassVar = {"format-version": "3"}
    # Files are rewritten, rows stay.
    housekeeping = frozenset(("replace",))

    @classmethod
    def configure(cls, session: SparkSession, template: str) -> None:
        # A session's catalog would go on with a table as it was before another session's commit.
        session.conf.set(f"spark.sql.catalog.{template.split('.')[0].strip('`')}.cache-enabled", "false")

    def present(self, properties: Mapping[str, str]) -> int | None:
        found = properties.get("current-snapshot-id", "none")
        return None if found == "none" else int(found)

    def commits(self, limit: int | None) -> list[Commit]:
        # A table that was turned back has newer snapshots than its present one.
        at = self.present(read_properties(self._spark, self._name) or {})
        bound = "" if limit is None else f" LIMIT {limit}"
        rows = self._spark.sql(f"""
            SELECT snapshot_id, parent_id, operation, summary[{_SAID!r}] AS said
            FROM {self._name}.snapshots ORDER BY committed_at DESC{bound}
        """).collect()
        by_id = {row.snapshot_id: row for row in rows}
        if at is not None and at not in by_id and limit is not None:
            return self.commits(None)
        found = []
        while at in by_id:
            row = by_id[at]
            found.append(Commit(row.snapshot_id, row.operation, read_said(row.said)))
            at = row.parent_id
        return found

    def committed(self) -> int | None:
        table = _loaded(self._spark, self._name)
        snapshot = table.currentSnapshot()
        for _ in range(RECENT):
            if snapshot is None:
                break
            if snapshot.summary().get(_SAID) == self._text:
                return int(snapshot.snapshotId())
            snapshot = None if snapshot.parentId() is None else table.snapshot(snapshot.parentId())
        return None

    def sign(self, text: str, step: str) -> None:
        self._spark.conf.set(f"spark.sql.iceberg.snapshot-property.{_SAID}", text)

    def age(self, version: int | None) -> int:
        found = None if version is None else _loaded(self._spark, self._name).snapshot(version)
        return 0 if found is None else int(found.sequenceNumber())

    def prepare(self, layout: MirroredLayout, fills: Mapping[int, str | None], *, anew: bool) -> None:
        super().prepare(layout, fills, anew=anew)
        assert self._said is not None
        if self._version is None and self.present(self._said) is None:
            # It has a version before it has rows.
            append = _loaded(self._spark, self._name).newAppend()
            append.set(_SAID, self._signed(ANEW_STEP))
            append.commit()
            self._version = self.committed()

    def _write_empty(self, schema: StructType, properties: Mapping[str, str], *, replaces: bool) -> None:
        if replaces:
            super()._write_empty(schema, properties, replaces=True)
            return
        # A write without rows takes a job of Spark's, and half a second.
        columns = ", ".join(f"{quoted(field.name)} {field.dataType.simpleString()}" for field in schema)
        given = ", ".join(f"{literal(key)} = {literal(value)}" for key, value in properties.items())
        self._spark.sql(f"CREATE TABLE {self._name} ({columns}) USING iceberg TBLPROPERTIES ({given})")

    def add_files(self, step: Step, part: Files) -> None:
        """Take over files as they are, where the table has just their columns; else have their rows written."""
        assert self._said is not None
        columns = Columns.read(self._said[COLUMNS])
        written = {file["layout"] for file in part.files}
        is_as_written = all(Columns.of(read_layout(text), self._shape) == columns for text in written)
        if is_as_written and not part.again and not self._shape.has_variants:
            table = _loaded(self._spark, self._name)
            said = {_SAID: self._signed(step.name, is_last=step.is_last)}
            if has_columns(table, columns.schema.names) and take_over(self._spark, table, part.files, said):
                self._version = self.committed()
                return
        super().add_files(step, part)

    @classmethod
    def write_together(cls, session: SparkSession, name: str, text: str) -> None:
        # CALL … rewrite_data_files cannot have its commits say anything.
        actions: Any = session._jvm
        actions = actions.org.apache.iceberg.spark.actions.SparkActions.get(session._jsparkSession)
        for action in ("rewriteDataFiles", "rewritePositionDeletes"):
            rewrite = getattr(actions, action)(_loaded(session, name))
            rewrite.option("min-file-size-bytes", str(SMALL_BYTES)).snapshotProperty(_SAID, text).execute()


def _loaded(session: SparkSession, name: str) -> Any:
    """Iceberg's own object of a table, as the table is now."""
    jvm: Any = session._jvm
    return jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(session._jsparkSession, name)
