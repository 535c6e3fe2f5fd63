"""Iceberg's tables by Spark's SQL alone, as Spark Connect has it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar

from pyspark.sql import SparkSession

from pg_cdc_source.lake.bring import Mark
from pg_cdc_source.lake.compaction import SMALL_BYTES
from pg_cdc_source.mirrors.catalog_names import backquoted
from pg_cdc_source.mirrors.catalog_tables import catalog_of, read_properties
from pg_cdc_source.mirrors.merge_sql import literal
from pg_cdc_source.mirrors.spark_commits import COLUMNS_STEP, RECENT, Commit, read_said
from pg_cdc_source.mirrors.spark_table import SparkTable

SAID = "pgcdc"


class IcebergTable(SparkTable):
    """A table of an Iceberg catalog. Its versions are ids of snapshots."""

    provider = "iceberg"
    # Each commit writes a file that names all snapshots. Nobody reads an old one, and by default all of them stay.
    upkeep: ClassVar = {"write.metadata.delete-after-commit.enabled": "true"}
    properties: ClassVar = {
        "format-version": "2",
        "write.merge.mode": "merge-on-read",
        "write.update.mode": "merge-on-read",
        "write.delete.mode": "merge-on-read",
        **upkeep,
    }
    properties_of_variants: ClassVar = {"format-version": "3"}
    # Files are rewritten, rows stay.
    housekeeping = frozenset(("replace",))

    @classmethod
    def configure(cls, session: SparkSession, template: str) -> None:
        # A session's catalog would go on with a table as it was before another session's commit.
        catalog, _ = catalog_of(session, template)
        session.conf.set(f"spark.sql.catalog.{catalog}.cache-enabled", "false")

    def present(self, properties: Mapping[str, str]) -> int | None:
        found = properties.get("current-snapshot-id", "none")
        return None if found == "none" else int(found)

    @classmethod
    def is_of(cls, spark: SparkSession, name: str, version: int, mark: Mark) -> bool:
        # No other table's snapshot has its id: to read it would be an error.
        return True

    def commits(self, limit: int | None) -> list[Commit]:
        # A table that was turned back has newer snapshots than its present one.
        at = self.present(read_properties(self._spark, self._name) or {})
        bound = "" if limit is None else f" LIMIT {limit}"
        rows = self._spark.sql(f"""
            SELECT snapshot_id, parent_id, operation, summary[{SAID!r}] AS said
            FROM {self._name}.snapshots ORDER BY committed_at DESC{bound}
        """).collect()
        by_id = {row.snapshot_id: row for row in rows}
        if at is not None and at not in by_id and limit is not None:
            return self.commits(None)
        found = []
        while at in by_id:
            row = by_id[at]
            found.append(Commit(row.snapshot_id, row.parent_id, row.operation, read_said(row.said)))
            at = row.parent_id
        return found

    def follows(self, version: int, before: int) -> bool:
        # Altering columns makes no snapshot. The next one has another schema.
        log = self._log()
        schemas = dict(log)
        return (before, version) in pairwise(at for at, _ in log) and schemas[before] == schemas[version]

    def alters(self, version: int, before: int) -> bool:
        schemas = dict(self._log())
        if before not in schemas or schemas[before] == schemas.get(version, schemas[before]):
            return False
        # SQL does not have Iceberg's numbers of columns. It is those that differ where two schemas look the same.
        was, now = (
            self._spark.sql(f"SELECT * FROM {self._name} VERSION AS OF {at}").schema for at in (before, version)
        )
        moved = any((a.name, a.dataType) != (b.name, b.dataType) for a, b in zip(was, now, strict=False))
        return moved or was == now

    def _log(self) -> list[tuple[int, int]]:
        """The snapshots that the table had one after the other, each with its schema's id."""
        rows = self._spark.sql(f"""
            SELECT timestamp, latest_snapshot_id, latest_schema_id FROM {self._name}.metadata_log_entries
            WHERE latest_schema_id IS NOT NULL
        """).collect()
        return [(row.latest_snapshot_id, row.latest_schema_id) for row in sorted(rows)]

    def sign(self, text: str, number: int | None) -> None:
        self._spark.conf.set(f"spark.sql.iceberg.snapshot-property.{SAID}", text)

    def committed(self) -> int | None:
        said = read_said(self._text)
        return next((commit.version for commit in self.commits(RECENT) if commit.said == said), None)

    def _commit_columns(self) -> None:
        # A snapshot is read with the columns that the table had when it was made.
        self._signed(COLUMNS_STEP)
        self._append_nothing()

    def _append_nothing(self) -> None:
        """Make a snapshot with the rows of the one before, signed as the session's commits are."""
        self._spark.table(self._name).where("false").writeTo(self._name).append()

    def age(self, version: int | None) -> int:
        if version is None:
            return 0
        numbers = self._spark.sql(f"""
            SELECT min(latest_sequence_number) FROM {self._name}.metadata_log_entries
            WHERE latest_snapshot_id = {version}
        """).collect()
        return numbers[0][0] or 0

    @classmethod
    def write_together(cls, session: SparkSession, name: str, text: str) -> None:
        # The commits of a procedure cannot say anything.
        catalog, table = catalog_of(session, name)
        options = f"map('min-file-size-bytes', '{SMALL_BYTES}')"
        for procedure in ("rewrite_data_files", "rewrite_position_delete_files"):
            call = f"CALL {backquoted(catalog)}.system.{procedure}"
            session.sql(f"{call}(table => {literal(table)}, options => {options})").collect()
