"""The shop's copy in Delta tables: one table each, merged batch by batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from pg_cdc_source import collapse, project
from pg_cdc_source.demo.shop import TABLES

# The application whose transactions the tables' commits record.
APPLICATION = "demo"
_KEPT = "CASE WHEN array_contains(s._unchanged, '{0}') THEN t.{0} ELSE s.{0} END"


def _zeros() -> dict[str, int]:
    return dict.fromkeys(TABLES, 0)


@dataclass(slots=True)
class Progress:
    """How far the copy is. The query's thread writes it and the screen reads it, so no key is ever added or removed."""

    snapshot_rows: dict[str, int] = field(default_factory=_zeros)
    changes: dict[str, int] = field(default_factory=_zeros)
    snapshot_done_at: float | None = None
    applied_at: float = 0.0
    applied_lsn: int = 0
    newest_commit: datetime | None = None
    batches: int = 0

    def has_followed(self, seconds: float) -> bool:
        """Whether changes were applied, and the snapshot at least ``seconds`` ago."""
        done_at = self.snapshot_done_at
        return done_at is not None and self.newest_commit is not None and time.monotonic() > done_at + seconds


class DeltaCopy:
    """One Delta table for each table of the shop."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self._url = url
        self.progress = Progress()

    def path(self, table: str) -> str:
        return str(self._directory / table)

    def apply(self, batch: DataFrame, batch_id: int) -> None:
        batch = batch.persist()
        try:
            snapshot = f.col("_change_type") == "snapshot"
            found = batch.groupBy("_table", snapshot.alias("snapshot")).agg(
                f.count("*").alias("rows"), f.max("_commit_lsn").alias("lsn"), f.max("_commit_ts").alias("at")
            )
            facts = found.collect()
            for name in sorted({fact["_table"] for fact in facts}):
                self._apply_to(name.removeprefix("shop."), project(batch, name, url=self._url), batch_id)
        finally:
            batch.unpersist()
        progress, now = self.progress, time.monotonic()
        for fact in facts:
            counter = progress.snapshot_rows if fact["snapshot"] else progress.changes
            counter[fact["_table"].removeprefix("shop.")] += fact["rows"]
            progress.applied_lsn = max(progress.applied_lsn, fact["lsn"])
            if fact["at"] is not None:
                progress.newest_commit = max(progress.newest_commit or fact["at"], fact["at"])
        if progress.snapshot_done_at is None and all(progress.snapshot_rows.values()):
            progress.snapshot_done_at = now
        progress.batches += 1
        progress.applied_at = now

    def _apply_to(self, table: str, rows: DataFrame, batch_id: int) -> None:
        """Merge a table's rows. The commit records the batch, so that a replayed batch is recognised."""
        path = self.path(table)
        if DeltaTable.is_deltatable(path) and _version(DeltaTable(path)) >= batch_id:
            return
        states = collapse(rows, TABLES[table]).toArrow()
        names = states.column_names[: states.column_names.index("_change_type")]
        target = DeltaTable.create(path, states.select(names).schema, mode="ignore")
        (
            target.merge(
                # Built anew: deltalake cannot read empty lists as Spark 4.0 writes them.
                states.filter(pc.is_valid(states["_change_type"])),
                " AND ".join(f"t.{key} = s.{key}" for key in TABLES[table]),
                source_alias="s",
                target_alias="t",
                commit_properties=CommitProperties(app_transactions=[Transaction(APPLICATION, batch_id)]),
            )
            .when_matched_delete("s._change_type = 'delete'")
            .when_matched_update({name: _KEPT.format(name) for name in names})
            .when_not_matched_insert({name: f"s.{name}" for name in names}, "s._change_type <> 'delete'")
            .execute()
        )


def _version(table: DeltaTable) -> int:
    version = table.transaction_version(APPLICATION)
    return -1 if version is None else version
