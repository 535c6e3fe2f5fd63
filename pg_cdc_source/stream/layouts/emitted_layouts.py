"""Layouts in a stream with ``onSchemaChange=emit``: what its offsets carry of them, and which rows say them.

In other streams there are none: every answer is empty, and relations are matched with the plan.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn, Member, Position, StreamOffset
from pg_cdc_source.options.names import dotted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.protocol.changes import Described
from pg_cdc_source.protocol.envelope import json_kind
from pg_cdc_source.protocol.layout import StreamedTable
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.protocol.stream_rows import schema_row_at
from pg_cdc_source.protocol.table_layout import LayoutRecord, from_text, sent_of, to_text
from pg_cdc_source.protocol.transactions import SentRelation
from pg_cdc_source.stream.layouts.catalog_layouts import CatalogLayouts
from pg_cdc_source.stream.layouts.guessed_layouts import as_catalog, guesses_at, read_guesses
from pg_cdc_source.stream.layouts.layout_history import LayoutHistory, is_behind_rows
from pg_cdc_source.stream.layouts.schema_history import match_relation
from pg_cdc_source.stream.received.buffer import Match
from pg_cdc_source.stream.received.chunks import Chunk
from pg_cdc_source.stream.tables.leaving import Refused
from pg_cdc_source.stream.tables.stream_plan import PlannedTable, StreamPlan
from pg_cdc_source.stream.tables.table_scans import narrowed

log = logging.getLogger(__name__)

# What the catalog has of a table, and where the last layout begins that was known of it when that was read.
PresentLayout = tuple[LayoutRecord, Position]

# Of a table that waits for its rows: the catalog does not tell since where.
_GAP = Refused(
    "changes of it may be missing: it was created again, or not published as before for a while, or a partition was "
    "attached that had rows",
    "wait: its rows come again",
)
# Of one that nothing can be read of any more.
_UNREAD = Refused(
    "it was dropped, or left the publication, before its first rows were read, so they are missing",
    "nothing has to be done where it is gone for good; where it is published again, its rows come",
)


class EmittedLayouts:
    """Knows the layouts from the offset on that this process began with."""

    def __init__(self, options: StreamOptions, schema: pa.Schema) -> None:
        self.are_emitted = options.on_schema_change == "emit"
        self._schema = schema
        self._catalog = CatalogLayouts(options)
        self._history = LayoutHistory(self._catalog.look)
        self._has_begun = False
        self._begun_with: StreamOffset | None = None  # the end of the batch that it began with
        self._owed: list[int] = []

    # --- offsets ------------------------------------------------------------------------------------------------------

    def resume(self, start: StreamOffset | None, end: StreamOffset | None = None, *, guessed: bool = False) -> None:
        """Go on from ``start``, or with the batch from there to ``end``. It matters once: then all is known.

        But for a batch whose end was ``guessed``: it says the same layouts also where another one was repeated before.
        """
        offset = end or start
        is_known = self._has_begun and not (guessed and end != self._begun_with)
        if is_known or offset is None or not self.are_emitted:
            return
        self._has_begun, self._begun_with = True, end
        guesses = () if end is None else guesses_at(start, end)
        if not guesses:
            self._history.begin(from_text(offset.layouts), offset.position)
            return
        if start is None:
            known = [record for record in from_text(offset.layouts) if record not in guesses]
            self._history.begin(known, Position.before(offset.origin))
        else:
            self._history.begin(from_text(start.layouts), start.position)
        self._history.look_until(offset.position, {r.layout.oid: as_catalog(r) for r in guesses})
        self._history.add(guesses)

    def text(self, start: Position, end: Position, members: Iterable[Member]) -> str:
        """What the offset at ``end`` of a batch from ``start`` carries; ``members`` are those at both."""
        return self._history.text(start, end, _oids(members)) if self.are_emitted else ""

    def keep(self, members: Iterable[Member]) -> None:
        """Forget the layouts of all other tables: they have left, and what decodes their rows has ended."""
        self._history.keep(_oids(members))

    def note_snapshot(self, session: Session, tables: Iterable[Member], point: Lsn) -> None:
        """Take the layouts of tables whose rows come as of ``point``, as the transaction of ``session`` sees them."""
        if self.are_emitted:
            self._has_begun = True
            there = tuple(tables)
            found = self._catalog.records(session, there, self._catalog.find(session, there), _of_snapshot(point))
            self._history.add(self._history.behind(record, as_catalog(record)) for record in found)

    def with_layouts_at_end_of_wal(
        self, session: Session, tables: Sequence[Member], end: StreamOffset, end_of_wal: Callable[[], Position]
    ) -> StreamOffset:
        """Give ``end`` the end of the WAL, and the layouts there; the rows before, and the start, are not known."""
        if not self.are_emitted:
            return replace(end, position=end_of_wal())
        # Where the batch starts, and with which layouts, it will say itself.
        self._has_begun = False
        position, guesses = read_guesses(self._catalog, session, tables, end_of_wal)
        return replace(end, position=position, layouts=to_text((*from_text(end.layouts), *guesses)))

    def take_rewritten(self, start: Position, end: Position) -> list[int]:
        """The tables, by oid, that the rows between say are rewritten: their rows have to come again, as of a later
        point. Their names may be others by now. Those that were owed from before are given once.
        """
        oids = [record.layout.oid for record in self._history.rewritten(start, end)] if self.are_emitted else []
        oids, self._owed = [*self._owed, *oids], []
        return oids

    def ends_before_rewritten(self, start: Position, end: Position) -> list[Position]:
        """Where a batch from ``start`` may end: before each commit up to ``end`` that says a table is rewritten."""
        records = self._history.rewritten(start, end) if self.are_emitted else ()
        ends = (Position.before(record.position.lsn) for record in records)
        return [earlier for earlier in ends if earlier > start]

    # --- layouts that no row has said ---------------------------------------------------------------------------------

    def read_present(
        self, session: Session, tables: Sequence[Member], end_of_wal: Callable[[], Position]
    ) -> tuple[Position, tuple[PresentLayout, ...]]:
        """The end of the WAL, and the layouts that the catalog has there, where they are not those of the last rows."""
        known = {table.oid: self._history.newest(table.oid) for table in tables}
        end, records = read_guesses(self._catalog, session, tables, end_of_wal)
        both = ((record, known[record.layout.oid]) for record in records)
        return end, tuple((r, last.position) for r, last in both if last is not None and last.layout != r.layout)

    def are_renamed(self, found: Iterable[PresentLayout]) -> bool:
        """Whether any of these tables has another name than its last rows had."""
        known = ((present.layout, self._history.newest(present.layout.oid)) for present, _ in found)
        return any(last is not None and last.layout.name != layout.name for layout, last in known)

    def is_rewrite_among(self, found: Iterable[PresentLayout]) -> bool:
        """Whether any of these says that its table is rewritten."""
        return any(self._history.rewrites(present, as_catalog(present), known_at) for present, known_at in found)

    def announce(self, start: Position, found: Iterable[PresentLayout]) -> bool:
        """Have the batch from ``start`` that ends where these were read say what rows have not said by now.

        Return whether that is all: rows may have said a part of it, and the rest has to be looked for again.
        """
        is_all = True
        for present, known_at in found:
            record = self._history.reach_present(present, as_catalog(present), known_at)
            if record is not None and record.is_rewritten and record.position <= start:
                # It is not between where the batch starts and where it ends.
                self._owed.append(record.layout.oid)
            newest = self._history.newest(present.layout.oid)
            is_all &= record is not None or newest is None or newest.position == known_at
        return is_all

    # --- rows ---------------------------------------------------------------------------------------------------------

    def rows_before_snapshot(self, oids: Iterable[int], point: Lsn, members: Iterable[Member]) -> list[Chunk]:
        """The rows that stand before the rows of tables as of ``point``; ``members`` are all tables of the stream."""
        position, known = _of_snapshot(point), _oids(members)
        records = [record for oid in oids if (record := self._history.at(oid, position)) is not None]
        return [self._row(r.layout.as_streamed(), self._history.said(r, known), position) for r in records]

    def as_said(self, planned: PlannedTable, point: Lsn) -> PlannedTable:
        """``planned`` with the columns and the key that stand before its rows as of ``point``.

        It may have been altered since.

        Values of a column that is gone, or has another kind of value, are NULL and listed in ``_unchanged``. The
        changes behind the rows say what became of it.
        """
        # Where a batch's end was given before its start was known, they are those at the end (``guessed_layouts``).
        places = (_of_snapshot(point), Position.before(point)) if self.are_emitted else ()
        record = next((found for place in places if (found := self._history.at(planned.oid, place))), None)
        if record is None:
            return planned
        table = record.layout.as_streamed()
        if record.layout.is_sent_as(_sent_columns(planned)) and _has_columns_of(table, planned.table):
            return replace(planned, table=replace(planned.table, key=table.key, identity=table.identity))
        log.warning(
            "%s was altered before its rows as of %s were read; they may be of a later state", *(planned.name, point)
        )
        present = {column.attnum: column for column in planned.scan.columns}
        kept = {
            codec.column.name: present[codec.column.attnum]
            for codec in table.codecs
            if codec.column.attnum in present
            and json_kind(codec.column.type_oid) == json_kind(present[codec.column.attnum].type_oid)
        }
        unsent = tuple(codec.column.name for codec in table.codecs if codec.column.name not in kept)
        return replace(planned, scan=narrowed(planned.scan, list(kept.values())), table=replace(table, unsent=unsent))

    def rows_of_guesses(self, start: StreamOffset | None, end: StreamOffset) -> list[Chunk]:
        """The rows at the end of a batch that say layouts which its rows have not had."""
        guesses = guesses_at(start, end) if self.are_emitted else ()
        if not guesses:
            return []
        reached = [self._history.reach(record) for record in guesses]
        self._owed = [record.layout.oid for record in reached if record is not None and record.is_rewritten]
        position = Position(end.position.lsn, 0)
        oids = _oids((*(() if start is None else start.members or ()), *(end.members or ())))
        new = [record for record in reached if record is not None]
        return [self._row(r.layout.as_streamed(), self._history.said(r, oids), position) for r in new]

    def rows_of_announced(
        self, start: StreamOffset | None, end: StreamOffset, begin: Position, again: Collection[int]
    ) -> list[Chunk]:
        """The rows at the end of a batch that say layouts which no row has.

        Of tables whose rows come ``again``, all since their point: it may be before what earlier batches have said.
        """
        if not self.are_emitted or start is None:
            return []
        oids = _oids((*(start.members or ()), *(end.members or ())))
        before = {(record.layout.oid, record.position) for record in from_text(start.layouts)}
        found = [
            record
            for record in from_text(end.layouts)
            if is_behind_rows(record.position)
            and (
                record.position > begin
                if record.layout.oid in again
                else record.position.lsn >= start.position.lsn and (record.layout.oid, record.position) not in before
            )
        ]
        return [
            self._row(r.layout.as_streamed(), self._history.said(r, oids), Position(r.position.lsn, 0)) for r in found
        ]

    def rows_of_left(
        self, start: StreamOffset | None, end: StreamOffset, refused: Mapping[int, Refused]
    ) -> list[Chunk]:
        """The rows at the end of a batch that say which tables have left with it, and why, if they are ``refused``."""
        if not self.are_emitted or start is None or start.members is None or end.members is None:
            return []
        known = {member.oid for member in end.members} | {member.name for member in end.members}
        position = Position(end.position.next_lsn, 0)
        return [
            self._without_rows(member.oid, member.name, "left", refused.get(member.oid), position)
            for member in start.members
            if known.isdisjoint((member.oid, member.name))
        ]

    def rows_of_gaps(self, start: StreamOffset | None, end: StreamOffset, unread: Mapping[int, str]) -> list[Chunk]:
        """The rows at the end of a batch that say of which tables changes may be missing, until their rows come.

        ``unread`` are tables whose rows it should have, and that left before these were read: names by their oids.
        """
        if not self.are_emitted:
            return []
        oids = {member.name: member.oid for member in end.members or ()}
        new = [] if start is None else [name for name in end.gaps if name not in start.gaps]
        return [
            *(self._gap(oids[name], name, _GAP, end) for name in new),
            *(self._gap(oid, name, _UNREAD, end) for oid, name in unread.items()),
        ]

    def _gap(self, oid: int, name: str, why: Refused, end: StreamOffset) -> Chunk:
        # Changes may follow, so the row has the columns that they have.
        record, position = self._history.last(oid, end.position), Position(end.position.lsn, 0)
        if record is None:
            return self._without_rows(oid, name, "gap", why, position)
        said = {**json.loads(record.to_object()), "changes": [_change("gap", why)]}
        return self._row(record.layout.as_streamed(), json.dumps(said), position)

    def match(self, plan: StreamPlan) -> Match:
        """How relations are understood."""

        oids = _oids(plan.members)

        def match(sent: SentRelation, position: Position) -> Described | None:
            relation = sent.relation
            if self.are_emitted and relation.oid in oids:
                since = plan.since.get(relation.oid, Lsn(0))
                return self._history.describe(relation, position, oids, since, sent.xid)
            return match_relation(plan, sent)

        return match

    def match_back(self, plan: StreamPlan) -> Match:
        """As :meth:`match`, for changes that tables are turned back by: None for those that have other columns.

        Another replica identity is no reason: it is looked at whether each change says what it has to.
        """

        def match(sent: SentRelation, _: Position) -> Described | None:
            planned = plan.find(sent.relation.oid)
            if planned is None:
                return match_relation(plan, sent)
            # Rows without a value could not be found among those that have it by now.
            if not _has_same_columns(planned, sent.relation):
                return None
            if not self.are_emitted:
                return match_relation(plan, sent)
            if dotted(sent.relation.schema, sent.relation.name) != planned.name:
                return None
            same = replace(planned, table=replace(planned.table, identity=sent.relation.identity, key=()))
            return match_relation(replace(plan, planned=(same,)), sent)

        return match

    def close(self) -> None:
        self._catalog.close()

    def _without_rows(self, oid: int, name: str, change: str, why: Refused | None, position: Position) -> Chunk:
        """The row that says why no more rows of a table come."""
        after = json.dumps({"columns": [], "changes": [_change(change, why)]})
        return self._row(StreamedTable(oid, name, (), (), (), ""), after, position)

    def _row(self, table: StreamedTable, after: str, position: Position) -> Chunk:
        return Chunk.of(schema_row_at(table, after, position, self._schema), position, position)


def _oids(members: Iterable[Member]) -> frozenset[int]:
    return frozenset(member.oid for member in members)


def _sent_columns(planned: PlannedTable) -> list[RelationColumn]:
    table = planned.table
    names = [codec.column.name for codec in table.codecs]
    return [RelationColumn(name in table.key, name, *of) for name, of in zip(names, table.type_oids, strict=True)]


def _has_columns_of(said: StreamedTable, present: StreamedTable) -> bool:
    """Whether columns of the same names are the same ones; 0 is the number of one that is not known."""
    pairs = zip(said.codecs, present.codecs, strict=True)
    return all(one.column.attnum in (0, other.column.attnum) for one, other in pairs)


def _has_same_columns(planned: PlannedTable, relation: RelationMessage) -> bool:
    """Whether the columns of ``relation`` are those that were planned."""
    columns = [sent_of(column) for column in _sent_columns(planned) if column.name not in planned.table.unsent]
    return [sent_of(column) for column in relation.columns] == columns


def _change(change: str, why: Refused | None) -> dict[str, str | None]:
    said = {"change": change, "attnum": None, "name": None, "was": None}
    return said if why is None else {**said, **asdict(why)}


def _of_snapshot(point: Lsn) -> Position:
    """Where the rows of a snapshot are."""
    return Position(Lsn(point - 1), 0)
