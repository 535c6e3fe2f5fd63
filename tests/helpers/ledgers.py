"""A mirror's ledger in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from pg_cdc_source.lake.ledger import LedgerRow


@dataclass
class Rows:
    """The ledger of one query."""

    template: str
    rows: list[LedgerRow] = field(default_factory=list)

    def create(self, template: str) -> None:
        assert template == self.template

    def last(self, lsn: int | None = None, query: str | None = None) -> LedgerRow | None:
        return self.rows[-1] if self.rows else None

    def append(self, row: LedgerRow) -> None:
        self.rows.append(row)
