"""Tables that were altered, and of which no row has come since: a stream with ``onSchemaChange=emit`` says so.

Columns come with the next row, which may take a year. Until then a sink would have what PostgreSQL has no more: other
columns, and other values where ``ALTER COLUMN … USING`` or a column's DEFAULT gave its rows some. So the catalog is
looked at as well::

    ALTER TABLE ──► a look finds it, with the end of the WAL there, E ──► the stream reads up to E: no row has said it
                                                                     ──► the batch that ends at E says it

- What is seen before E was asked for and after it alike is as of E: no row behind E is older.
- Behind a start, all tables are compared. After that only where some column's row of the catalog is another one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Member, Position
from pg_cdc_source.postgres.lock_waits import waiting_for_nobody
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slots import wait_for_end_of_wal
from pg_cdc_source.postgres.table_layouts import read_mark
from pg_cdc_source.protocol.table_layout import LayoutRecord
from pg_cdc_source.stream.emitted_layouts import EmittedLayouts
from pg_cdc_source.stream.source_session import SourceSession


class AlteredTables:
    """Finds them. ``position`` is where the batch has to end that says it, None where there is nothing to say."""

    def __init__(self, source: SourceSession, layouts: EmittedLayouts) -> None:
        self.position: Position | None = None
        self._source = source
        self._layouts = layouts
        self._found: tuple[LayoutRecord, ...] = ()
        self._mark = ""  # of the catalog, when all that it has was said or found

    @property
    def was_looked_for(self) -> bool:
        """Whether this process has compared all tables, or need not."""
        return bool(self._mark) or not self._layouts.are_emitted

    def look(self, tables: Sequence[Member]) -> None:
        """Look at the catalog, unless what it has is still to be said."""
        if self._layouts.are_emitted and self.position is None:
            # What cannot be had now is looked for again.
            self._source.ask_in_passing(lambda session: self._look(session, tables))

    def _look(self, session: Session, tables: Sequence[Member]) -> None:
        with translated("looking for tables that were altered"), session.cursor() as cursor, waiting_for_nobody(cursor):
            mark = read_mark(session, [table.oid for table in tables])
            if mark == self._mark:
                return
            end, found = self._layouts.read_present(
                session, tables, lambda: Position.before(wait_for_end_of_wal(session))
            )
        self._mark = mark
        if found:
            self.position, self._found = end, found

    def reach(self, start: Position, end: Position, coming: Collection[int]) -> None:
        """A batch from ``start`` ends at ``end``. Tables whose rows are ``coming`` say it with these."""
        if self.position is None or end < self.position:
            return
        now = [record for record in self._found if record.layout.oid not in coming]
        if end == self.position:
            self._layouts.reach(start, now)
        if end > self.position or len(now) < len(self._found):
            self._mark = ""  # so that all are compared again
        self.position, self._found = None, ()
