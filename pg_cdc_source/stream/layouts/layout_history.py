"""The layouts that a stream's tables had and have, as its offsets carry them (``onSchemaChange=emit``).

A layout is found out when its first row is decoded: from the Relation message, the layout before it, and the catalog,
which may have moved on when the same rows are asked for again. So what was found is a record with that row's position.
An offset carries, for each table that is the stream's before or behind its batch, the last record before the batch, and
all records within it::

    records     ──a1────────b1──────a2─────────────a3────►
    batch                       start ────────── end

Its end carries b1, the last one of b before the start, and of a the one before the start and that within: a1, a2. It
does not carry a3.

- Rows up to an offset that was given out (``settled``) have the layouts that it carries. Nobody asks the catalog again.
- A record that is behind the end of a batch comes into the offset of a later one.
- A table may be altered, and no row of it comes for a year. So a record can also be one that the catalog has at the
  end of a batch (``reach_present``): it is behind all rows of its position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from threading import RLock

from pg_cdc_source.errors import START_OVER, DefiniteError
from pg_cdc_source.offsets import ALL, Lsn, Position
from pg_cdc_source.protocol.changes import Described
from pg_cdc_source.protocol.layout_match import TypeOf, find_changes, find_layout
from pg_cdc_source.protocol.pgoutput import RelationMessage
from pg_cdc_source.protocol.table_layout import CatalogLayout, LayoutChange, LayoutRecord, TableLayout, to_text

# What the catalog says of a table now, None where it is gone or nobody asks (False); and what types are.
Look = Callable[[RelationMessage, bool, int | None], tuple[CatalogLayout | None, TypeOf]]

_BEGINNING = Lsn(0)
# Behind all rows of a commit: they are counted by LSNs.
_BEHIND = ALL >> 1
_NOWHERE = Position(_BEGINNING, 0)


class LayoutHistory:
    """Knows the layout of each row, and what is announced before it.

    Rows are described under the lock of whoever decodes them, ahead of Spark. What others do takes its turn with that.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._turn = RLock()
        # By the tables' oids, in the order of their positions: a stream may have thousands of tables.
        self._records: dict[int, tuple[LayoutRecord, ...]] = {}
        self._settled = _NOWHERE
        # Up to some position, the catalog as an offset has it, by the tables' oids.
        self._catalog_until = _NOWHERE
        self._catalog: dict[int, CatalogLayout] = {}
        self._written: tuple[tuple[LayoutRecord, ...], str] = (), ""

    def begin(self, records: Iterable[LayoutRecord], settled: Position) -> None:
        """Take over the layouts of an offset that ends at ``settled``."""
        self._records = {}
        for record in records:
            self._put(record)
        self._settled = settled

    def add(self, records: Iterable[LayoutRecord]) -> None:
        """Add layouts, one a table, from a snapshot on. Rows behind it that have the same begin nothing any more."""
        for record in records:
            known = self._of(record.layout.oid)
            kept = [k for k in known if k.position < record.position or k.layout != record.layout]
            self._records[record.layout.oid] = _in_order((*kept, record))

    def look_until(self, position: Position, catalog: dict[int, CatalogLayout]) -> None:
        """For rows up to ``position``, ask ``catalog`` instead of the one that there is now."""
        self._catalog_until, self._catalog = position, catalog

    def keep(self, oids: Collection[int]) -> None:
        """Forget all other tables: no rows of theirs come any more."""
        self._records = {oid: records for oid, records in self._records.items() if oid in oids}

    def text(self, start: Position, end: Position, oids: Collection[int]) -> str:
        """What the offset at ``end`` of a batch from ``start`` carries of these tables."""
        records = self._between(start, end, oids)
        if records != self._written[0]:
            self._written = records, to_text(records)
        return self._written[1]

    def rewritten(self, start: Position, end: Position) -> tuple[LayoutRecord, ...]:
        """The tables that a batch says are rewritten: their rows have to come again, as of a point after ``end``."""
        # At once: rows that are decoded meanwhile may be the first ones of another table.
        records = (record for of_table in tuple(self._records.values()) for record in of_table)
        return _in_order(r for r in records if start < r.position <= end and r.is_rewritten)

    def at(self, oid: int, position: Position) -> LayoutRecord | None:
        """The layout that begins at ``position``."""
        return next((record for record in self._of(oid) if record.position == position), None)

    def last(self, oid: int, position: Position) -> LayoutRecord | None:
        """The layout that a table has up to ``position``; None where no row has had one."""
        return next((record for record in reversed(self._of(oid)) if record.position <= position), None)

    def describe(
        self,
        relation: RelationMessage,
        position: Position,
        oids: Collection[int],
        since: Lsn = _BEGINNING,
        xid: int | None = None,
    ) -> Described:
        """Return what rows of ``relation`` are from ``position`` on. Commits before ``since`` are left out.

        ``oids`` are the stream's tables, ``xid`` is the transaction that the relation was sent in. Raises
        TransientError where the catalog is behind that.
        """
        index = tuple(range(len(relation.columns)))
        if position.lsn < since:
            # It is sent again before later rows, should its columns change in between.
            layout = self._layout_at(relation, Position(since, 0), xid)
            return Described(layout.as_streamed(), relation, index, since=since)
        with self._turn:
            record, is_new = self._find(relation, position, xid)
        announced = self.said(record, oids) if is_new else None
        return Described(record.layout.as_streamed(), relation, index, announced, since)

    def said(self, record: LayoutRecord, oids: Collection[int]) -> str:
        """The JSON object that announces a layout. It also tells whether another of the tables has its former name."""
        others = (self.last(oid, record.position) for oid in oids if oid != record.layout.oid)
        name = record.former_name
        taken = name is not None and any(other is not None and other.layout.name == name for other in others)
        return record.to_object(former_name_taken=taken)

    def _layout_at(self, relation: RelationMessage, position: Position, xid: int | None) -> TableLayout:
        """A layout of ``relation`` that no row begins."""
        last = self.last(relation.oid, position)
        if last is not None and last.layout.is_sent_as(relation.columns):
            return last.layout
        return self._compare(relation, None if last is None else last.layout, position, xid)[0]

    def _find(self, relation: RelationMessage, position: Position, xid: int | None) -> tuple[LayoutRecord, bool]:
        """The record that a row has, and whether it begins there."""
        known = self.last(relation.oid, position)
        if known is not None and (known.position == position or position <= self._settled):
            if not known.layout.is_sent_as(relation.columns):
                name = known.layout.name
                raise DefiniteError(
                    f"{name}: columns in the commit at {position.lsn} are not those that the checkpoint says",
                    remedy=START_OVER,
                )
            return known, known.position == position
        layout, changes = self._compare(relation, None if known is None else known.layout, position, xid)
        if known is not None and not changes and layout.columns == known.layout.columns:
            # VACUUM FULL, or another default: the next change is told from what is there now.
            self._put(replace(known, layout=layout), instead_of=known)
            return known, False
        record = LayoutRecord(position, layout, changes)
        self._put(record)
        return record, True

    def _compare(
        self, relation: RelationMessage, known: TableLayout | None, position: Position, xid: int | None = None
    ) -> tuple[TableLayout, tuple[LayoutChange, ...]]:
        # What looks has one session.
        with self._turn:
            is_known = position <= self._catalog_until
            # Whoever writes to a table that is as it was may wait for a synchronous standby, and is not waited for.
            is_altered = known is not None and known.as_sent() != relation
            catalog, type_of = self._look(relation, not is_known, xid if is_altered else None)
            if is_known:
                catalog = self._catalog.get(relation.oid)
            return find_layout(relation, known, catalog, type_of)

    def newest(self, oid: int) -> LayoutRecord | None:
        """The last layout that is known of a table, maybe ahead of Spark; None where none is."""
        known = self._of(oid)
        return known[-1] if known else None

    def reach_present(self, record: LayoutRecord, catalog: CatalogLayout, known_at: Position) -> LayoutRecord | None:
        """Come, without a row, to the layout that the catalog has at the record's position.

        ``known_at`` is where :meth:`newest` began when it was read: what rows have said since, they know better. Return
        what is to be announced behind all rows there; None where nothing is.
        """
        with self._turn:
            last = self._last_before(record, known_at)
            if last is None:
                return None
            changes = find_changes(last.layout, record.layout, catalog)
            if not changes:
                # As where a row comes: the next change is told from what is there now.
                if record.layout.columns == last.layout.columns and record.layout != last.layout:
                    self._put(replace(last, layout=record.layout), instead_of=last)
                return None
            is_behind = last.position.lsn == record.position.lsn and last.position.seq >= _BEHIND
            seq = last.position.seq + 1 if is_behind else _BEHIND
            found = replace(record, position=Position(record.position.lsn, seq), changes=changes)
            self._put(found)
            return found

    def rewrites(self, record: LayoutRecord, catalog: CatalogLayout, known_at: Position) -> bool:
        """Whether :meth:`reach_present` would say that the table is rewritten."""
        with self._turn:
            last = self._last_before(record, known_at)
        return last is not None and any(
            change.change == "rewritten" for change in find_changes(last.layout, record.layout, catalog)
        )

    def _last_before(self, present: LayoutRecord, known_at: Position) -> LayoutRecord | None:
        """The layout before one that was read at its position, if rows have said no other since."""
        last = self.newest(present.layout.oid)
        is_last = last is not None and last.position == known_at <= Position(present.position.lsn, ALL)
        return last if is_last else None

    def reach(self, record: LayoutRecord) -> LayoutRecord | None:
        """Come to a layout without a row that has it; the record to be announced, None where nothing is new."""
        # Where the WAL stands still, another one may begin at the same position.
        known = (r for r in reversed(self._of(record.layout.oid)) if r.position <= record.position and r != record)
        before = next(known, None)
        if before is None:
            return replace(record, changes=())
        _, changes = self._compare(record.layout.as_sent(), before.layout, record.position)
        return replace(record, changes=changes) if changes else None

    def behind(self, record: LayoutRecord, catalog: CatalogLayout) -> LayoutRecord:
        """The layout of rows as of a point, with what changed since the rows before; ``catalog`` is what it has there.

        That those have other values now is no change: all rows come anew. A sink may keep the ones that it has.
        """
        before = self._before(record)
        changes = () if before is None else find_changes(before.layout, record.layout, catalog)
        return replace(record, changes=tuple(change for change in changes if change.change != "rewritten"))

    def _of(self, oid: int) -> tuple[LayoutRecord, ...]:
        return self._records.get(oid, ())

    def _before(self, record: LayoutRecord) -> LayoutRecord | None:
        return next((r for r in reversed(self._of(record.layout.oid)) if r.position < record.position), None)

    def _put(self, record: LayoutRecord, instead_of: LayoutRecord | None = None) -> None:
        oid = record.layout.oid
        self._records[oid] = _in_order((*(known for known in self._of(oid) if known is not instead_of), record))

    def _between(self, start: Position, end: Position, oids: Collection[int]) -> tuple[LayoutRecord, ...]:
        """The last record of each table up to ``start``, and all behind it up to ``end``."""
        found = []
        # What is said of the same layouts is always the same text.
        for oid in sorted(self._records.keys() & set(oids)):
            found += [] if (last := self.last(oid, start)) is None else [last]
            found += [record for record in self._of(oid) if start < record.position <= end]
        return _in_order(found)


def is_behind_rows(position: Position) -> bool:
    """Whether no row is there: the layout that begins there was read from the catalog (``reach_present``)."""
    return _BEHIND <= position.seq < ALL


def _in_order(records: Iterable[LayoutRecord]) -> tuple[LayoutRecord, ...]:
    # A snapshot may be of a point that changes have passed.
    return tuple(sorted(records, key=lambda known: known.position))
