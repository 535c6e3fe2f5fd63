"""Iceberg's tables by Spark's SQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pyspark.sql import SparkSession

from pg_cdc_source.lake.compaction import SMALL_BYTES
from pg_cdc_source.mirrors.catalog_tables import read_properties
from pg_cdc_source.mirrors.spark_table import Commit, SparkTable, read_said

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

    def sign(self, text: str, step: str) -> None:
        self._spark.conf.set(f"spark.sql.iceberg.snapshot-property.{_SAID}", text)

    def age(self, version: int | None) -> int:
        found = None if version is None else _loaded(self._spark, self._name).snapshot(version)
        return 0 if found is None else int(found.sequenceNumber())

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
