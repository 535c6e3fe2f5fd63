"""The ledger: a row for each batch says at which LSN all tables stand, and at which version each of them does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.delta_rs import Mark

TEMPLATE = "pgcdc.target"
LEDGER_SCHEMA = pa.schema(
    [
        pa.field("query", pa.string()),
        pa.field("batch_id", pa.int64()),
        pa.field("lsn", pa.int64()),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC")),
        pa.field("applied_at", pa.timestamp("us", tz="UTC")),
        pa.field("tables", pa.map_(pa.string(), pa.int64())),
        pa.field("set_aside", pa.map_(pa.string(), pa.string())),
    ]
)


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One batch: ``lsn`` is the greatest commit position that the tables have."""

    query: str
    batch_id: int
    lsn: int
    commit_ts: datetime | None
    applied_at: datetime
    tables: Mapping[str, int] = field(default_factory=dict)
    set_aside: Mapping[str, str] = field(default_factory=dict)


class Ledger:
    """A ledger in a Delta table at ``path``, written by delta-rs."""

    def __init__(self, path: str) -> None:
        self.path = path

    def create(self, template: str) -> None:
        """Create it, if it is not there. ``template`` says where its tables are."""
        DeltaTable.create(
            self.path,
            LEDGER_SCHEMA,
            mode="ignore",
            configuration={TEMPLATE: template},
            raise_if_key_not_exists=False,
        )

    def last(self, lsn: int | None = None, query: str | None = None) -> LedgerRow | None:
        """The newest row, of those up to ``lsn`` or of ``query`` if these are given; None where there is none."""
        if not DeltaTable.is_deltatable(self.path):
            return None
        rows = DeltaTable(self.path).to_pyarrow_table()
        if lsn is not None:
            rows = rows.filter(pc.less_equal(rows["lsn"], lsn))
        if query is not None:
            rows = rows.filter(pc.equal(rows["query"], query))
        if not rows.num_rows:
            return None
        (row,) = rows.sort_by([("applied_at", "descending"), ("batch_id", "descending")]).slice(0, 1).to_pylist()
        return LedgerRow(**{**row, "tables": dict(row["tables"]), "set_aside": dict(row["set_aside"])})

    @property
    def template(self) -> str:
        """Where its tables are. Raises OptionError for what is no ledger."""
        found = None
        if DeltaTable.is_deltatable(self.path):
            found = DeltaTable(self.path).metadata().configuration.get(TEMPLATE)
        if found is None:
            raise OptionError(f"{self.path} is no ledger of a mirror", remedy="name the ledger that mirror() writes")
        return str(found)

    def append(self, row: LedgerRow) -> None:
        values: dict[str, Any] = {name: [getattr(row, name)] for name in LEDGER_SCHEMA.names}
        values["tables"], values["set_aside"] = [list(row.tables.items())], [list(row.set_aside.items())]
        mark = Mark(row.query, row.batch_id)
        rows = pa.table(values, schema=LEDGER_SCHEMA)
        write_deltalake(self.path, rows, mode="append", commit_properties=mark.commit(mark.whole()))
