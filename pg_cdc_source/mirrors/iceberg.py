"""Iceberg's tables by Spark's SQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pyspark.sql import SparkSession

from pg_cdc_source.mirrors.spark_table import Commit, SparkTable, read_properties, read_said

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
