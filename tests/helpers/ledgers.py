"""A mirror's ledger in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from pg_cdc_source.lake.ledger import LedgerRow


@dataclass
class Rows:
    """A ledger. Where nothing is asked for, its last row is the newest."""

    template: str
    rows: list[LedgerRow] = field(default_factory=list)

    def create(self, template: str) -> None:
        pass

    def move(self, template: str) -> None:
        self.template = template

    def last(self, lsn: int | None = None, query: str | None = None) -> LedgerRow | None:
        found = [row for row in self.rows if query in (None, row.query)]
        return found[-1] if found else None

    def queries(self) -> frozenset[str]:
        return frozenset(row.query for row in self.rows)

    def append(self, row: LedgerRow) -> None:
        self.rows.append(row)
