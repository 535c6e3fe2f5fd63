"""A ledger in a Delta table that delta-rs writes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from pg_cdc_source.errors import OptionError, TransientError
from pg_cdc_source.lake.bring import Mark, Step
from pg_cdc_source.lake.compaction import compact_where_due
from pg_cdc_source.lake.ledger import LEDGER_SCHEMA, OF_BATCH, TEMPLATE, LedgerRow, newest_by
from pg_cdc_source.mirrors.delta_rs import compact
from pg_cdc_source.mirrors.delta_rs_commits import commit_of
from pg_cdc_source.mirrors.delta_rs_log import LOG_PROPERTIES_OF_LEDGER, clean_where_due


class DeltaRsLedger:
    """A ledger at ``path``."""

    def __init__(self, path: str, *, compacts: bool = False) -> None:
        self.path = path
        self._compacts = compacts

    def create(self, said: Mapping[str, str]) -> None:
        DeltaTable.create(
            self.path,
            LEDGER_SCHEMA,
            mode="ignore",
            configuration={**said, **LOG_PROPERTIES_OF_LEDGER},
            raise_if_key_not_exists=False,
        )

    def note(self, said: Mapping[str, str]) -> None:
        try:
            DeltaTable(self.path).alter.set_table_properties(dict(said), raise_if_not_exists=False)
        except DeltaError as error:
            raise TransientError(
                f"the ledger {self.path} cannot note what its tables keep: {error}",
                remedy="see that no other mirror writes it, and start the query again",
            ) from error

    def last(self, lsn: int | None = None, query: str | None = None, since: int = 0) -> LedgerRow | None:
        if not DeltaTable.is_deltatable(self.path):
            return None
        rows = DeltaTable(self.path).to_pyarrow_dataset()
        wanted = pc.field("is_whole") if query is None else pc.field("query") == query
        if lsn is not None:
            wanted &= pc.field("lsn") <= lsn
        if since:
            wanted &= pc.field("batch_id") >= since
        by = [(name, "descending") for name in newest_by(query)]
        # Without the names of all tables in each row, and a part after the other: there may be millions of rows.
        parts = rows.scanner(columns=list(OF_BATCH), filter=wanted).to_reader()
        newest = [part.take(pc.select_k_unstable(part, 1, by)) for part in parts if part.num_rows]
        if not newest:
            return None
        (batch,) = pa.Table.from_batches(newest).sort_by(by).slice(0, 1).to_pylist()
        is_it = (pc.field(name) == value for name, value in batch.items())
        return LedgerRow.of(rows.to_table(filter=reduce(and_, is_it)).to_pylist()[0])

    def queries(self) -> frozenset[str]:
        if not DeltaTable.is_deltatable(self.path):
            return frozenset()
        found = DeltaTable(self.path).to_pyarrow_dataset().to_table(columns=["query"])
        return frozenset(found["query"].unique().to_pylist())

    @property
    def said(self) -> Mapping[str, str]:
        found: Mapping[str, str] = {}
        if DeltaTable.is_deltatable(self.path):
            found = DeltaTable(self.path).metadata().configuration
        if TEMPLATE not in found:
            raise OptionError(f"{self.path} is no ledger of a mirror", remedy="name the ledger that mirror() writes")
        return found

    def append(self, row: LedgerRow) -> None:
        mark = Mark(row.query, row.batch_id)
        commit = commit_of(mark, Step("row", is_last=True))
        write_deltalake(self.path, row.to_arrow(), mode="append", commit_properties=commit)
        before, now = row.batch_id, row.batch_id + 1
        if self._compacts:
            compact_where_due(self.path, before, now, lambda: compact(DeltaTable(self.path), commit_of(mark)))
        clean_where_due(self.path, before, now)
