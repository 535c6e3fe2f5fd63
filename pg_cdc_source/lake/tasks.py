"""What a task does with the rows that a batch has of some tables."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pg_cdc_source.errors import RESNAPSHOT, DefiniteError, PgCdcError, SchemaChangedError
from pg_cdc_source.lake.bring import Mark, Work
from pg_cdc_source.lake.parts import parts_of
from pg_cdc_source.lake.rows_of_batch import REFUSED, BatchRow
from pg_cdc_source.lake.segment import Segment
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.table_batch import TableBatch
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.offsets import ALL

log = logging.getLogger(__name__)

# How errors begin that may be the catalog's or the store's. What a table itself is the reason of is definite.
OF_ANY_TABLE = ("[TRANSIENT]", "Spark: ")

OUTCOME_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string()),
        pa.field("version", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("error", pa.string()),
        pa.field("lsn", pa.int64()),
        pa.field("seq", pa.int64()),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC")),
        pa.field("through", pa.int64()),
        pa.field("staged", pa.string()),
        pa.field("is_within", pa.bool_()),
        pa.field("gone", pa.list_(pa.struct({"table": pa.string(), "lsn": pa.int64(), "seq": pa.int64()}))),
    ]
)


# What a table's rows can raise where nobody foresaw it; the next attempt has the same rows. Other errors (of files,
# memory, the installation) may strike any table and be gone when the batch comes again, so they end the query.
_OF_ROWS = (ValueError, ArithmeticError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a batch begins: whose it is, at which versions tables stood, and which were set aside.

    ``catching_up`` are tables whose first rows are not all as of one point.
    """

    mark: Mark
    versions: Mapping[str, int]
    set_aside: Mapping[str, str]
    catching_up: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Task(ABC):
    """Reads all rows that a batch has of some tables: runs, and files that were written of them."""

    targets: Targets
    start: Start
    shapes: Shapes

    def outcomes(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return what became of each table, in rows of ``OUTCOME_SCHEMA``; ``rows`` are of ``RUNS_SCHEMA``."""
        by_table: dict[str | None, list[BatchRow]] = {}
        for row in rows:
            by_table.setdefault(row["_table"], []).append(BatchRow.of(row, self.shapes))
        return [self._outcome(table, found) for table, found in by_table.items()]

    def _outcome(self, table: str | None, rows: list[BatchRow]) -> dict[str, Any]:
        times = [row.commit_ts for row in rows if row.commit_ts is not None]
        outcome: dict[str, Any] = dict.fromkeys(OUTCOME_SCHEMA.names)
        lsn, seq = max(row.place for row in rows)
        outcome |= {
            "table": table,
            "rows": sum(row.rows for row in rows if row.is_counted),
            "lsn": lsn,
            "seq": seq,
            "commit_ts": max(times, default=None),
            "through": max(row.through for row in rows),
            "is_within": any(row.kind == "position" and row.place[1] != ALL for row in rows),
            "gone": [],
        }
        if table is None:
            return outcome
        outcome["gone"] = list(_gone(table, rows))
        refused = [row.after for row in rows if row.kind == REFUSED]
        if refused:
            return outcome | {"error": refused[0]}
        try:
            # A name that leads elsewhere is the table's own fault.
            self.targets[table]
            work = self._work(table, rows)
            if work is not None:
                outcome |= self._do(table, work)
        except PgCdcError as error:
            outcome["error"] = str(error)
        except MemoryError:
            # Arrow's is one of its own as well.
            raise
        except _OF_ROWS as error:
            # Not its text, which may have a row's values.
            what = f"{table} could not be written: {type(error).__name__}"
            log.error("%s, raised by\n%s", what, "".join(traceback.format_tb(error.__traceback__)))
            remedy = (
                "report it as a defect, with what the executor's standard error says; pg-cdc resnapshot tries again"
            )
            outcome["error"] = str(DefiniteError(what, remedy=remedy))
        return outcome

    def _work(self, table: str, rows: Sequence[BatchRow]) -> Work[Segment] | None:
        """What is to be done; None where the table stays set aside."""
        shape, stands_still = self.shapes[table], table in self.start.set_aside
        batch = TableBatch.of(table, rows, shape, stands_still=stands_still)
        # Somebody's TRUNCATE does not do: changes may be missing behind it.
        if stands_still and not (batch.comes_whole and batch.has_come_again):
            return None
        if batch.changes.is_rewritten and not batch.comes_whole:
            raise SchemaChangedError(
                f"{table} was rewritten, and the rows that the lake has are not those of PostgreSQL any more",
                remedy="wait: the stream reads its rows again. Should they not come: pg-cdc resnapshot",
            )
        is_catching_up = table in self.start.catching_up and not batch.comes_whole
        if is_catching_up or any(row.through for row in rows):
            if batch.has_moved_values:
                # The row that the lake has under the old key may be another one by now.
                raise _unknown_values(table, "a row whose key was changed")
            if shape.is_soft and batch.keeps_values:
                # The lake may lack the row: it was deleted before they were read, and would stay without the values.
                raise _unknown_values(table, "a row that was changed")
        is_replaced = batch.comes_whole and not shape.keeps
        return Work(batch.layout, batch.changes.fills, parts_of(batch), is_replaced)

    @abstractmethod
    def _do(self, table: str, work: Work[Segment]) -> Mapping[str, Any]:
        """Do it, or prepare it; what the outcome says of it."""


def _unknown_values(table: str, row: str) -> SchemaChangedError:
    return SchemaChangedError(
        f"{table}: its first rows were read again after a crash, DDL or a lost session, and PostgreSQL did not send "
        f"all values of {row} meanwhile",
        remedy=RESNAPSHOT,
    )


def _gone(table: str, rows: Iterable[BatchRow]) -> Iterator[dict[str, Any]]:
    """Names under which nothing is streamed any more, and since where: this one, and what the table was called before.

    Another table may have a name again: it came later, or had it before this one's new name was noticed (``taken``).
    """
    for row in rows:
        lsn, seq = row.place
        for change in row.schema_changes:
            if change["change"] == "left" and "why" not in change:
                yield {"table": table, "lsn": lsn, "seq": seq}
            elif change["change"] == "renamed" and change["attnum"] is None and "taken" not in change:
                yield {"table": change["was"], "lsn": lsn, "seq": seq}
