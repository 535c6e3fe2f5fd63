"""Tables that were altered, and of which no row has come since: a stream with ``onSchemaChange=emit`` says so.

Columns come with the next row, which may take a year. Until then a sink would have what PostgreSQL has no more: other
columns, and other values where ``ALTER COLUMN … USING`` or a column's DEFAULT gave its rows some. So the catalog is
looked at as well::

    ALTER TABLE ──► a look finds it, with the end of the WAL there, E ──► the stream reads up to E: no row has said it
                                                                     ──► the batch that ends at E says it

- What the catalog has both before and after E was read is as of E. Rows that come meanwhile win: their commit may be in
  the WAL while the catalog does not show it yet.
- Behind a start, all tables are compared. After that only where the catalog's rows of them are others.
- Tables whose rows come again say it with these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Member, Position
from pg_cdc_source.postgres.lock_waits import waiting_for_nobody
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slots import wait_for_end_of_wal
from pg_cdc_source.postgres.table_layouts import read_mark
from pg_cdc_source.stream.layouts.emitted_layouts import EmittedLayouts, PresentLayout
from pg_cdc_source.stream.tables.source_session import SourceSession

# Before, a walsender goes on with a schema's old name until something else is altered in its tables.
_NEW_NAMES_VERSION = 160000


class AlteredTables:
    """Finds them. ``position`` is where the batch has to end that says it, None where there is nothing to say."""

    def __init__(self, source: SourceSession, layouts: EmittedLayouts) -> None:
        self.position: Position | None = None
        self.were_looked_for = not layouts.are_emitted  # in this process
        self._source = source
        self._layouts = layouts
        self._found: tuple[PresentLayout, ...] = ()
        # From where on rows have to be read in another session, because this one sends old names of tables.
        self.old_names_until: Position | None = None
        self._mark = ""  # of the tables and the catalog, at the last look

    def look(self, tables: Sequence[Member]) -> None:
        """Look at the catalog, unless what it has is still to be said."""
        if self._layouts.are_emitted and self.position is None:
            self.were_looked_for = True
            # What cannot be had now is looked for again.
            self._source.ask_in_passing(lambda session: self._look(session, tables))

    def _look(self, session: Session, tables: Sequence[Member]) -> None:
        with translated("looking for tables that were altered"), session.cursor() as cursor, waiting_for_nobody(cursor):
            # A table's own name is the stream's, until a look at the publication has found another.
            names = " ".join(f"{table.oid} {table.name}" for table in tables)
            mark = f"{read_mark(session, [table.oid for table in tables])} {names}"
            if mark == self._mark:
                return
            end, found = self._layouts.read_present(
                session, tables, lambda: Position.before(wait_for_end_of_wal(session))
            )
            if session.server_version < _NEW_NAMES_VERSION and self._layouts.are_renamed(found):
                self.old_names_until = end
        self._mark = mark
        if found:
            self.position, self._found = end, found

    def rewrites_at(self, end: Position, coming: Collection[int]) -> bool:
        """Whether a batch that ends at ``end`` says that a table is rewritten, other than those that are ``coming``."""
        return end == self.position and self._layouts.is_rewrite_among(self._of_others(coming))

    def reach(self, start: Position, end: Position, coming: Collection[int]) -> None:
        """A batch from ``start`` ends at ``end``. Tables whose rows are ``coming`` say it with these."""
        if self.position is None or end < self.position:
            return
        # Where the batch goes further it is too late for these.
        if end > self.position or not self._layouts.announce(start, self._of_others(coming)):
            self._mark = ""
        self.position, self._found = None, ()

    def _of_others(self, coming: Collection[int]) -> list[PresentLayout]:
        return [found for found in self._found if found[0].layout.oid not in coming]
