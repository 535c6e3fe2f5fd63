"""What the catalog says of tables' layouts, in a session of its own: the thread that reads may be the one to ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.offsets import Member, Position
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres.answers import answered_within
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.horizon import wait_until_seen
from pg_cdc_source.postgres.kept_session import KeptSession
from pg_cdc_source.postgres.table_layouts import read_layouts, read_type_facts
from pg_cdc_source.protocol.layout_match import TypeOf, find_layout
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.protocol.table_layout import CatalogLayout, LayoutChange, LayoutRecord, TypeFacts
from pg_cdc_source.stream.tables.stream_plan import session_name

T = TypeVar("T")
TypeKey = tuple[int, int]
_TypeQuestion = Callable[[Session], dict[TypeKey, TypeFacts]]


class CatalogLayouts:
    """Looks tables up. What a type is does not change while its oid is in use, so it is asked for once."""

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._session = KeptSession(partial(connect, options.connection, session_name(options, "layouts")))
        self._types: dict[TypeKey, TypeFacts] = {}

    def look(
        self, relation: RelationMessage, asks: bool, xid: int | None = None
    ) -> tuple[CatalogLayout | None, TypeOf]:
        """What the catalog says of a table now, None where it is gone or nobody ``asks``; and what its types are.

        Where it is known which transaction ``xid`` has sent the relation, what that has done is seen. Raises
        TransientError where it cannot be.
        """

        def read(session: Session) -> dict[int, CatalogLayout]:
            if xid is not None:
                wait_until_seen(session, xid)
            return read_layouts(session, self._options.publications, [relation.oid])

        found = self._ask(read) if asks else {}
        types = [(column.type_oid, column.typmod) for column in relation.columns]
        return found.get(relation.oid), self._types_of(types, self._ask)

    def find(self, session: Session, tables: Sequence[Member]) -> dict[int, CatalogLayout]:
        """What the catalog says of tables as ``session`` sees them, by their oids, without tables that are gone."""
        return read_layouts(session, self._options.publications, [table.oid for table in tables])

    def records(
        self, session: Session, tables: Sequence[Member], found: Mapping[int, CatalogLayout], position: Position
    ) -> tuple[LayoutRecord, ...]:
        """The layouts of tables of which the catalog was ``found`` to say so, for rows from ``position`` on.

        Their changes are what old rows have in columns that were added.
        """
        types = [column.sent[1:] for layout in found.values() for column in layout.columns if column.published]
        type_of = self._types_of(types, lambda question: question(session))
        return tuple(_record(table, found[table.oid], type_of, position) for table in tables if table.oid in found)

    def close(self) -> None:
        self._session.close()

    def _types_of(self, types: Sequence[TypeKey], ask: Callable[[_TypeQuestion], dict[TypeKey, TypeFacts]]) -> TypeOf:
        if missing := sorted(set(types) - self._types.keys()):
            self._types |= ask(lambda session: read_type_facts(session, missing))
        return lambda oid, typmod: self._types[oid, typmod]

    def _ask(self, question: Callable[[Session], T]) -> T:
        session = self._session.open()
        try:
            with answered_within(session):
                return question(session)
        except PgCdcError:
            self.close()
            raise


def _record(table: Member, found: CatalogLayout, type_of: TypeOf, position: Position) -> LayoutRecord:
    columns = tuple(
        RelationColumn(found.identity == "f" or column.name in found.key, *column.sent)
        for column in found.columns
        if column.published
    )
    schema, name = QualifiedName.parse(table.name).parts
    sent = RelationMessage(table.oid, schema, name, found.identity, columns)
    layout, _ = find_layout(sent, None, found, type_of)
    fills = (LayoutChange("added", c.attnum, c.name, None, c.fill) for c in found.columns if c.fill is not None)
    return LayoutRecord(position, layout, tuple(fills))
