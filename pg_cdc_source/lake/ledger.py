"""The ledger: a row for each batch says at which LSN all tables stand, and at which version each of them does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa

# What a ledger says of its tables, as its properties: where they are, and what they keep (``Shapes.digest``). The first
# ledgers say only where they are.
TEMPLATE, MODES, FORMAT = "pgcdc.target", "pgcdc.modes", "pgcdc.format"
LEDGER_SCHEMA = pa.schema(
    [
        pa.field("query", pa.string()),
        pa.field("batch_id", pa.int64()),
        pa.field("lsn", pa.int64()),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC")),
        pa.field("applied_at", pa.timestamp("us", tz="UTC")),
        pa.field("tables", pa.map_(pa.string(), pa.int64())),
        pa.field("set_aside", pa.map_(pa.string(), pa.string())),
        pa.field("is_whole", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One batch: ``lsn`` is the greatest commit position that the tables have.

    Where it is not ``is_whole``, the batch ends within that commit, and the tables are as of no point.
    """

    query: str
    batch_id: int
    lsn: int
    commit_ts: datetime | None
    applied_at: datetime
    tables: Mapping[str, int] = field(default_factory=dict)
    set_aside: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LedgerRow:
        """Read a row of the ledger's table."""
        return cls(**{**given, "tables": dict(given["tables"]), "set_aside": dict(given["set_aside"])})

    def to_arrow(self) -> pa.Table:
        """Return it as rows of ``LEDGER_SCHEMA``."""
        values: dict[str, Any] = {name: [getattr(self, name)] for name in LEDGER_SCHEMA.names}
        values["tables"], values["set_aside"] = [list(self.tables.items())], [list(self.set_aside.items())]
        return pa.table(values, schema=LEDGER_SCHEMA)


# What tells a ledger's rows from each other.
OF_BATCH = ("query", "batch_id", "applied_at")


def newest_by(query: str | None) -> Sequence[str]:
    """The columns by which a ledger's rows are in order: one query's by its batches, because clocks may be set back."""
    return ("batch_id",) if query is not None else ("applied_at", "batch_id")


class Ledger(Protocol):
    """A ledger in one of the lake's formats."""

    @property
    def said(self) -> Mapping[str, str]:
        """What it says of its tables. Raises OptionError for what is no ledger."""

    def create(self, said: Mapping[str, str]) -> None:
        """Create it, if it is not there."""

    def note(self, said: Mapping[str, str]) -> None:
        """Have it say this from now on."""

    def last(self, lsn: int | None = None, query: str | None = None, since: int = 0) -> LedgerRow | None:
        """The newest row that is whole, up to ``lsn`` if it is given; or the newest of ``query``, whole or not.

        ``since``: of that batch or a later one, so that files of older rows are not read. None where there is none.
        """

    def queries(self) -> frozenset[str]:
        """The queries whose rows it has; none where it is not there."""

    def append(self, row: LedgerRow) -> None:
        """Add a batch's row."""
