"""A mirror's ledger in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pg_cdc_source.lake.ledger import FORMAT, MODES, TEMPLATE, LedgerRow


@dataclass
class Rows:
    """A ledger. Where nothing is asked for, its last row is the newest."""

    template: str
    modes: str = ""
    format: str = ""
    rows: list[LedgerRow] = field(default_factory=list)
    noted: list[Mapping[str, str]] = field(default_factory=list)

    @property
    def said(self) -> Mapping[str, str]:
        return {TEMPLATE: self.template, MODES: self.modes, FORMAT: self.format}

    def create(self, said: Mapping[str, str]) -> None:
        pass

    def note(self, said: Mapping[str, str]) -> None:
        self.template, self.modes, self.format = said[TEMPLATE], said[MODES], said[FORMAT]
        self.noted.append(said)

    def last(self, lsn: int | None = None, query: str | None = None, since: int = 0) -> LedgerRow | None:
        found = [row for row in self.rows if query in (None, row.query) and row.batch_id >= since]
        return found[-1] if found else None

    def queries(self) -> frozenset[str]:
        return frozenset(row.query for row in self.rows)

    def append(self, row: LedgerRow) -> None:
        self.rows.append(row)
