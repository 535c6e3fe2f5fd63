"""Bring one table of the lake to the end of a batch, in a task. What is done is found in the table's commits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties

from pg_cdc_source.errors import PgCdcError, SchemaChangedError
from pg_cdc_source.lake.batch_of_table import FILE, Segment, TableBatch
from pg_cdc_source.lake.delta_rs import DeltaRsTable, ForeignWriterError, Mark
from pg_cdc_source.lake.states import states_of
from pg_cdc_source.lake.targets import Targets

OUTCOME_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string()),
        pa.field("version", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("error", pa.string()),
        pa.field("lsn", pa.int64()),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC")),
        pa.field("through", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Task:
    """What tasks know of a batch: where tables are, at which versions they stood, and which were set aside."""

    targets: Targets
    mark: Mark
    versions: Mapping[str, int]
    set_aside: Mapping[str, str]

    def outcomes(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Apply rows of runs and files, all that the batch has of their tables; what became of each table."""
        by_table: dict[str | None, list[Mapping[str, Any]]] = {}
        for row in rows:
            by_table.setdefault(row["_table"], []).append(row)
        return [self._outcome(table, found) for table, found in by_table.items()]

    def _outcome(self, table: str | None, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        times = [row["_commit_ts"] for row in rows if row["_commit_ts"] is not None]
        outcome: dict[str, Any] = {
            "table": table,
            "version": None,
            "rows": 0,
            "error": None,
            "lsn": max(row["_commit_lsn"] for row in rows),
            "commit_ts": max(times, default=None),
            "through": max(map(_through, rows)),
        }
        if table is None:
            return outcome
        outcome["rows"] = sum(row["rows"] for row in rows if row["_change_type"] in ("changes", "file"))
        try:
            outcome["version"] = self._apply(table, rows)
        except (PgCdcError, ForeignWriterError) as error:
            outcome["error"] = str(error)
        return outcome

    def _apply(self, table: str, rows: list[Mapping[str, Any]]) -> int | None:
        """Do what is left to be done; the table's version, None where it stays set aside."""
        lake = DeltaRsTable(self.targets[table], table)
        if lake.has(self.mark.whole()):
            return lake.version
        batch = TableBatch.of(table, rows)
        if table in self.set_aside and not batch.comes_whole:
            return None
        if batch.is_rewritten and not batch.comes_whole:
            raise SchemaChangedError(
                f"{table} was rewritten, and the rows that the lake has are not those of PostgreSQL any more",
                remedy="wait: the stream reads its rows again",
            )
        lake.require_ours(self.versions.get(table), self.mark, again=table in self.set_aside)
        if batch.layout is not None:
            lake.prepare(batch.layout, batch.fills, self.mark, anew=batch.comes_whole)
        elif lake.version < 0:
            return None
        steps: list[tuple[str, Callable[[CommitProperties], None]]] = []
        if batch.files:
            files = [json.loads(row["after"]) for row in batch.files]
            steps.append(("files", partial(_add, lake, files, batch.is_emptied)))
        elif batch.is_emptied:
            steps.append(("empty", lake.empty))
        for i, segment in enumerate(batch.segments):
            steps.append((f"segment {i}", partial(_apply_segment, lake, segment)))
        for i, (name, step) in enumerate(steps):
            if not lake.has(self.mark.step(name)):
                is_last = i == len(steps) - 1
                step(self.mark.commit(self.mark.step(name), *([self.mark.whole()] if is_last else [])))
        return lake.version


def _through(row: Mapping[str, Any]) -> int:
    """Up to which position the rows of a file may be; 0 for what is of the snapshot's very point."""
    return int(json.loads(row["after"])["through"] or 0) if row["_change_type"] == FILE else 0


def _add(lake: DeltaRsTable, files: Sequence[Mapping[str, Any]], anew: bool, commit: CommitProperties) -> None:
    lake.add_files(files, anew=anew, commit=commit)


def _apply_segment(lake: DeltaRsTable, segment: Segment, commit: CommitProperties) -> None:
    lake.apply(states_of(segment, partial(lake.fetch, segment.key)), commit)
