"""Iceberg's tables by Spark's SQL."""

from __future__ import annotations

from typing import ClassVar

from pyspark.sql import SparkSession

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
    # Files are rewritten, rows stay.
    housekeeping = frozenset(("replace",))

    @classmethod
    def configure(cls, session: SparkSession, template: str) -> None:
        # A session's catalog would go on with a table as it was before another session's commit.
        session.conf.set(f"spark.sql.catalog.{template.split('.')[0].strip('`')}.cache-enabled", "false")

    def commits(self, limit: int | None) -> list[Commit]:
        bound = "" if limit is None else f" LIMIT {limit}"
        # A table that was turned back has newer snapshots than its present one.
        rows = self._spark.sql(f"""
            SELECT s.snapshot_id, s.parent_id, s.operation, s.summary[{_SAID!r}] AS said, r.snapshot_id AS present
            FROM {self._name}.snapshots AS s CROSS JOIN {self._name}.refs AS r
            WHERE r.name = 'main' AND r.type = 'BRANCH' ORDER BY s.committed_at DESC{bound}
        """).collect()
        by_id = {row.snapshot_id: row for row in rows}
        found, at = [], rows[0].present if rows else None
        if at is not None and at not in by_id and limit is not None:
            return self.commits(None)
        while at in by_id:
            row = by_id[at]
            found.append(Commit(row.snapshot_id, row.operation, read_said(row.said)))
            at = row.parent_id
        return found

    def sign(self, text: str, step: str) -> None:
        self._spark.conf.set(f"spark.sql.iceberg.snapshot-property.{_SAID}", text)
